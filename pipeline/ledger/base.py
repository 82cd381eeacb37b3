"""What every ledger can do, wherever it is kept."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

from manycpu.pipeline.ledger.entry import Entry, VerbRecord
from manycpu.pipeline.spec.errors import ForeignRunError, ManycpuError

__all__ = ["Ledger"]


class Ledger(ABC):
    """The ledger of one run, which several processes may update."""

    @abstractmethod
    def open(self, entry: Entry) -> Entry:
        """Begin the ledger, or go on with the one that is there."""

    @abstractmethod
    def exists(self) -> bool:
        """Whether the run has begun, and has not been cleaned up."""

    @abstractmethod
    def read(self) -> Entry:
        """Read what is recorded.

        Raises:
            FileNotFoundError: The run has not begun, or is cleaned up.
        """

    @abstractmethod
    def update(self) -> AbstractContextManager[Entry]:
        """Change the ledger: what the block changes in the entry is recorded at its end."""

    @contextmanager
    def timed(self, verb: str) -> Iterator[VerbRecord]:
        """Record how a verb went; seconds add up over the tries of a run."""
        record, started = VerbRecord(seconds=0, result="done"), time.monotonic()
        try:
            yield record
        except ForeignRunError:
            raise  # the run is another task's, and goes on
        except BaseException as error:
            record.result, record.error = "failed", str(error) or type(error).__name__
            record.seconds = time.monotonic() - started
            with suppress(OSError, ManycpuError):  # a full disk, perhaps: the error itself says more
                self._add(verb, record)
            raise
        record.seconds = time.monotonic() - started
        self._add(verb, record)

    def _add(self, verb: str, record: VerbRecord) -> None:
        if not self.exists():
            return
        with self.update() as entry:
            before = entry.verbs.get(verb)
            if before is not None:
                record.seconds += before.seconds
            entry.verbs[verb] = record
