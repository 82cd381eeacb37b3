"""The interface of every ledger, and what all of them do alike."""

import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from manycpu.pipeline.ledger.entry import Entry, VerbRecord
from manycpu.pipeline.ledger.lease import LENGTH, RENEW_EVERY, Lease
from manycpu.pipeline.spec.credentials import redacted
from manycpu.pipeline.spec.errors import ForeignRunError, ManycpuError, RunGoneError, UnseenError

__all__ = ["Ledger", "pause"]

_JOIN = 5.0  # seconds that a renewal may still be under way when the work is done


def pause() -> float:
    """Choose the seconds until the next renewal, at random: the renewals of many runs are spread."""
    return random.uniform(0.5, 1.5) * RENEW_EVERY  # noqa: S311 - spreads load


class Ledger(ABC):
    """The ledger of one run, which several processes may update."""

    @abstractmethod
    def open(self, entry: Entry) -> Entry:
        """Create the ledger, or continue with the one that exists."""

    @abstractmethod
    def exists(self) -> bool:
        """Whether the run has begun, and has not been cleaned up."""

    @abstractmethod
    def read(self) -> Entry:
        """Read the entry.

        Raises:
            FileNotFoundError: The run has not begun, or is cleaned up.
        """

    @abstractmethod
    def update(self) -> AbstractContextManager[Entry]:
        """Change the entry: what the block changes is recorded at its end."""

    @abstractmethod
    def lease(self) -> Lease:
        """Read the lease of the run.

        Raises:
            RunGoneError: The run has not begun, or is cleaned up.
        """

    @abstractmethod
    def change_lease(self, **fields: Any) -> None:
        """Change fields of the lease; the others stay as they are.

        Raises:
            RunGoneError: The run has not begun, or is cleaned up.
        """

    def now(self) -> float:
        """Read the clock that leases go by, in seconds since the epoch."""
        return time.time()

    def renew(self, seconds: float = LENGTH) -> None:
        """Renew the lease for so many seconds from now.

        Raises:
            RunGoneError: The run was taken away.
        """
        self.change_lease(until=self.now() + seconds, ended=False, kept=False)

    def refuse_second(self) -> None:
        """Raise if another process of this machine runs all verbs of this run: both would clean up.

        Raises:
            ForeignRunError: One does; nothing of the run was touched.
        """
        lease = self.lease()
        if lease.holder is not None and lease.held_by_another(self.now()):
            raise ForeignRunError(
                f"process {lease.holder.pid} of this machine works on run {lease.holder.run}",
                fix=f"`manycpu logs --follow {lease.holder.run}` follows it, "
                f"`manycpu cancel {lease.holder.run}` ends it; or give another run id",
            )

    def keep(self, seconds: float | None) -> None:
        """Release the lease, and record for how long the run is kept; None: for ever."""
        until = None if seconds is None else self.now() + seconds
        self.change_lease(until=until, ended=True, kept=True, holder=None)

    @contextmanager
    def kept_alive(self, seconds: float = LENGTH) -> Iterator[None]:
        """Renew the lease for as long as the block works on the run, by so many seconds each time.

        Raises:
            RunGoneError: The run was taken away before the block began.
        """
        _renew_or_skip(self.renew, seconds)
        ended = threading.Event()
        renewal = threading.Thread(target=self._renew, args=(ended, seconds), daemon=True)
        renewal.start()
        try:
            yield
        finally:
            ended.set()
            renewal.join(_JOIN)

    def _renew(self, ended: threading.Event, seconds: float) -> None:
        while not ended.wait(pause()):
            with suppress(RunGoneError):  # whoever works on it will notice
                _renew_or_skip(self.renew, seconds)

    @contextmanager
    def timed(self, verb: str, lease: float = LENGTH) -> Iterator[VerbRecord]:
        """Hold the lease, and record a verb's result and seconds, which add up over the tries of a run."""
        record, started = VerbRecord(seconds=0, result="done"), time.monotonic()
        try:
            with self.kept_alive(lease):
                yield record
        except (ForeignRunError, UnseenError):
            raise  # the run is another's, and continues
        except BaseException as error:
            record.result, record.error = "failed", redacted(str(error)) or type(error).__name__
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


def _renew_or_skip(renew: Callable[[float], None], seconds: float) -> None:
    """Renew the lease; a failure waits for the next renewal: a lease is far longer than their interval."""
    try:
        renew(seconds)
    except RunGoneError:
        raise
    except (OSError, ManycpuError):
        return
