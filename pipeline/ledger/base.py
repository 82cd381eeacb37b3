"""The interface of every ledger, and the lease of a run: the run lives while its lease is renewed.

On Kubernetes the lease is annotations of the ledger, so that a list of ledgers shows the leases of all runs.
"""

import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Final

from pydantic import BaseModel

from manycpu.pipeline.adapters import process
from manycpu.pipeline.ledger.entry import Entry, VerbRecord
from manycpu.pipeline.spec.credentials import redacted
from manycpu.pipeline.spec.errors import ForeignRunError, ManycpuError, RunGoneError, UnseenError
from manycpu.pipeline.spec.handle import ProcessHandle

__all__ = [
    "LEASE_S",
    "REMOVED_ANNOTATION",
    "RENEW_INTERVAL_S",
    "Lease",
    "Ledger",
    "from_annotations",
    "pause",
    "to_annotations",
]

LEASE_S: Final = 86_400.0  # longer than a retry, a worker or a triggerer is away
RENEW_INTERVAL_S: Final = 600.0  # give or take half: 1,000 waiting runs write twice a second
_UNTIL, _ENDED, _KEPT, _HOLDER = (f"manycpu/{name}" for name in ("kept-until", "ended", "kept", "holder"))
REMOVED_ANNOTATION: Final = "manycpu/removed"
"""Annotation: the run is being removed, because its lease is over."""
_JOIN_TIMEOUT_S = 5.0  # for a renewal that is under way when the work is done


class Lease(BaseModel):
    """Until when a run is left alone, and who holds it."""

    until: float | None = None
    """Seconds since the epoch; None: for ever."""
    ended: bool = False
    """No process works on the run any more."""
    kept: bool = False
    """The run was cleaned up, and its results are kept until then."""
    holder: ProcessHandle | None = None
    """The process that does all of the run, whose death frees the lease; None: several work in turn."""

    def held(self, now: float) -> bool:
        """Whether a process works on the run, or is about to; ``now`` in seconds since the epoch."""
        if self.ended or self.until is None or self.until <= now:
            return False
        return self.holder is None or process.is_alive(self.holder) is not False

    def held_by_another(self, now: float) -> bool | None:
        """Whether another process runs all verbs of the run; None: it cannot be seen from here."""
        if self.holder is None or not self.held(now) or process.is_this_process(self.holder):
            return False
        return process.is_alive(self.holder)

    def over(self, now: float) -> bool:
        """Whether the lease has ended, so that others may remove the run."""
        return self.until is not None and self.until <= now


def from_annotations(meta: Mapping[str, Any]) -> Lease:
    """Read the lease from a ledger's metadata; annotations that manycpu did not write are ignored."""
    annotations = meta.get("annotations") or {}
    try:
        holder = annotations.get(_HOLDER)
        return Lease(
            until=annotations.get(_UNTIL),
            ended=_ENDED in annotations,
            kept=_KEPT in annotations,
            holder=ProcessHandle.model_validate_json(holder) if holder else None,
        )
    except ValueError:
        return Lease()


def to_annotations(**fields: Any) -> dict[str, str | None]:
    """Write fields of a lease as annotations; None removes one."""
    lease = Lease(**fields)
    annotations = {
        "until": (_UNTIL, None if lease.until is None else f"{lease.until:.0f}"),
        "ended": (_ENDED, "true" if lease.ended else None),
        "kept": (_KEPT, "true" if lease.kept else None),
        "holder": (_HOLDER, lease.holder.model_dump_json() if lease.holder else None),
    }
    return dict(annotations[name] for name in fields)


def pause() -> float:
    """Choose the seconds until the next renewal, with jitter that spreads the renewals of many runs."""
    return random.uniform(0.5, 1.5) * RENEW_INTERVAL_S  # noqa: S311 - spreads load


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
        """Change the entry in a ``with`` block; its changes are recorded at the end."""

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
        """Read the clock of leases, in seconds since the epoch."""
        return time.time()

    def renew(self, seconds: float = LEASE_S) -> None:
        """Renew the lease for so many seconds from now.

        Raises:
            RunGoneError: The run was deleted.
        """
        self.change_lease(until=self.now() + seconds, ended=False, kept=False)

    def refuse_second(self) -> None:
        """Raise if another process of this machine runs all verbs of this run: both would clean up.

        Raises:
            ForeignRunError: Another process does; nothing of the run was changed.
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
    def kept_alive(self, seconds: float = LEASE_S) -> Iterator[None]:
        """Renew the lease for as long as the block works on the run, by so many seconds each time.

        Raises:
            RunGoneError: The run was deleted before the block began.
        """
        _renew_or_skip(self.renew, seconds)
        ended = threading.Event()
        renewal = threading.Thread(target=self._renew, args=(ended, seconds), daemon=True)
        renewal.start()
        try:
            yield
        finally:
            ended.set()
            renewal.join(_JOIN_TIMEOUT_S)

    def _renew(self, ended: threading.Event, seconds: float) -> None:
        while not ended.wait(pause()):
            with suppress(RunGoneError):  # the block's own calls fail then
                _renew_or_skip(self.renew, seconds)

    @contextmanager
    def timed(self, verb: str, lease: float = LEASE_S) -> Iterator[VerbRecord]:
        """Hold the lease, and record a verb's result and seconds, which add up over the tries of a run."""
        record, started = VerbRecord(seconds=0, result="done"), time.monotonic()
        try:
            with self.kept_alive(lease):
                yield record
        except (ForeignRunError, UnseenError):
            raise  # the run belongs to another process, and continues
        except BaseException as error:
            record.result, record.error = "failed", redacted(str(error)) or type(error).__name__
            record.seconds = time.monotonic() - started
            with suppress(OSError, ManycpuError):  # such as a full disk: the first error says more
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
    """Renew the lease; after a failure, the next renewal is early enough."""
    try:
        renew(seconds)
    except RunGoneError:
        raise
    except (OSError, ManycpuError):
        return
