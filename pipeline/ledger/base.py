"""The models of a ledger, the interface of every ledger, and the lease, which protects a run from clean-up.

On Kubernetes the lease is in annotations of the ledger: a list of ledgers then shows the leases of all runs.
"""

import math
import random
import shlex
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, BaseModel, Field

from manycpu.pipeline.adapters import process
from manycpu.pipeline.spec.errors import (
    DISK_FULL,
    CancelledError,
    ForeignRunError,
    ManycpuError,
    RunGoneError,
    UnseenError,
    recordable,
)
from manycpu.pipeline.spec.handle import Handle, ProcessHandle
from manycpu.pipeline.spec.state import RunState
from manycpu.pipeline.spec.training_run import BUDGETS, LONGEST_S

LEASE_S: Final = 86_400.0  # longer than a run waits for its retry, or for a new worker or triggerer
RENEW_INTERVAL_S: Final = 600.0  # plus or minus half: 1,000 waiting runs write twice a second
_ANNOTATIONS: Final = {
    "until": "manycpu/kept-until",
    "renewed": "manycpu/renewed",
    "ended": "manycpu/ended",
    "kept": "manycpu/kept",
    "holder": "manycpu/holder",
}
REMOVED_ANNOTATION: Final = "manycpu/removed"
"""Annotation: the run is being removed, because its lease is over."""
_LATEST_TIME_S: Final = 1e11  # seconds since the epoch: a time that calendars can show
_JOIN_TIMEOUT_S = 5.0  # for a renewal that is under way when the work is done

CLEANUP: Final = "cleanup"
"""Name of the verb cleanup in ``Entry.verbs``; in ``Entry.cancelled``, if a clean-up ended the attempt."""

VERBS: Final = ("prepare", "stage", "build", "launch", "wait", "export", CLEANUP)
"""The verbs of a run, in their order."""

Result = Literal["done", "reused", "skipped", "failed"]
UnixTime = Annotated[float, Field(ge=0, lt=_LATEST_TIME_S, allow_inf_nan=False)]
"""Seconds since the epoch."""


def _complete_old_run(run: dict[str, Any]) -> dict[str, Any]:
    """Complete the fields of a run that an older version recorded.

    It left out the backend if that was gloo. It had no limit for time budgets: too long ones are shortened.
    """
    given = {name: run.get(name) for name in BUDGETS}
    too_long = [name for name, value in given.items() if isinstance(value, int) and value > LONGEST_S]
    return {"backend": "gloo", **run, **dict.fromkeys(too_long, LONGEST_S)}


RunFields = Annotated[dict[str, Any], AfterValidator(_complete_old_run)]
"""A run as ledgers keep it."""


class VerbRecord(BaseModel):
    """The result of one verb, and how long it took."""

    seconds: float
    result: Result
    error: str | None = None
    cancelled: bool = False
    """Whether it failed because a person cancelled the run."""


def _in_order(verbs: dict[str, VerbRecord]) -> dict[str, VerbRecord]:
    """Put verbs in the order of a run: a ConfigMap and older reports have them in alphabetical order."""
    return {verb: verbs[verb] for verb in dict.fromkeys((*VERBS, *verbs)) if verb in verbs}


Verbs = Annotated[dict[str, VerbRecord], AfterValidator(_in_order)]
"""Name of a verb -> its record, as ledgers and reports keep them."""


class Attempt(BaseModel):
    """What an attempt was started with; a user may edit the fields of the run before the next attempt."""

    run: RunFields
    target: dict[str, Any]
    data: str | None = None
    """Path of the staged data; the next two are those of the base model and the code snapshot."""
    model: str | None = None
    code: str | None = None
    image: str | None = None
    """The image by digest, on targets that have images."""
    digests: dict[str, str] = Field(default_factory=dict)
    """Kind of what was staged or built -> sha256 of its manifest."""
    hosts: tuple[str, ...] = ()
    """The hosts of the hostfile that it runs on: its files are there, even if the hostfile changes."""
    output_mount: str | None = None
    """On machines: the mount point above the output, if that is on a disk."""
    fruitless: bool = False
    """Whether it succeeded without writing the requested model: the next try trains again."""


class End(BaseModel):
    """How an attempt ended."""

    state: RunState
    reason: str = ""
    seconds: float | None = None


class Entry(BaseModel):
    """The content of a run's ledger, except the lease."""

    key: str
    name: str
    created: UnixTime
    run: RunFields
    """As the run was described before its first attempt; each attempt has a description of its own."""
    target: dict[str, Any]
    tasks: dict[str, str] = Field(default_factory=dict)
    """Step of the run (prepare, train) -> the task that did it first."""
    latest_try: int = 0
    """Number of the latest try of the task that does the whole run; 0: it is the first one, or unknown."""
    dag: dict[str, str] = Field(default_factory=dict)
    """``dag_id`` and ``run_id`` of its DAG run, and the ``instance`` of Airflow; empty outside of Airflow."""
    run_id: str = ""
    """What resumes the run as ``--run-id``; empty: a task of Airflow does, or an older version began it."""
    attempts: dict[int, Attempt] = Field(default_factory=dict)
    """Attempt -> what it was started with; older versions did not record it."""
    ends: dict[int, End] = Field(default_factory=dict)
    """Attempt -> how it ended, if that was observed."""
    attempt: int = 0
    handle: Handle | None = None
    cancelled: dict[int, str] = Field(default_factory=dict)
    """Attempt -> who ended it."""
    data: str | None = None
    """What was staged last, and in the next fields built: the next attempt starts with it."""
    model: str | None = None
    code: str | None = None
    image: str | None = None
    elsewhere: dict[str, str] = Field(default_factory=dict)
    """Objects that the run made outside of its own namespace: namespace/kind/name -> why."""
    owner: str = ""
    """Only this ledger on machines has it, and the file ``owner`` in the run's folder on a host.
    Empty: an older version wrote none."""
    checkpoints_since: UnixTime | None = None
    """Part of the name of the run's folder below ``run.checkpoints``: when the run began for the first time
    after it had succeeded. None: it has not succeeded before, and the folder has the run's name alone."""
    hosts: tuple[str, ...] = ()
    """The hosts of a hostfile that may have a folder of the run; older versions did not record them."""
    observed: dict[str, Any] | None = None
    """Reports of the present attempt's ranks, on targets whose logs are not kept."""
    digests: dict[str, str] = Field(default_factory=dict)
    export: dict[str, Any] | None = None
    returned: Literal["read", "unread"] | None = None
    """Whether the caller could read what a notebook's function returned; None: it has not tried yet."""
    verbs: Verbs = Field(default_factory=dict)

    @property
    def outputs(self) -> set[str]:
        """Every ``run.output`` with which the run began or an attempt was started."""
        described = [self.run, *(attempt.run for attempt in self.attempts.values())]
        return {run["output"] for run in described if run.get("output")}

    @property
    def cancelled_by(self) -> str | None:
        """Who cancelled the present attempt; None: it was not cancelled."""
        return self.cancelled.get(self.attempt)

    def cancelled_by_person(self, attempt: int) -> bool:
        """Whether a person or a task cancelled an attempt; False also if only the clean-up ended it."""
        by = self.cancelled.get(attempt)
        return by is not None and by != CLEANUP

    def record_canceller(self, by: str) -> None:
        """Record who cancels the present attempt, unless it is recorded that a person or a task did so."""
        if not self.cancelled_by_person(self.attempt):
            self.cancelled[self.attempt] = by

    def described(self, attempt: int | None = None) -> Attempt:
        """Return what an attempt was started with; if that is not recorded, the entry's own fields.

        ``attempt`` None: the present attempt.
        """
        recorded = self.attempts.get(self.attempt if attempt is None else attempt)
        return recorded or Attempt.model_validate(self.model_dump(include=set(Attempt.model_fields)))


class Lease(BaseModel):
    """How long a run is protected from removal, and which process holds it."""

    until: float | None = None
    """Seconds since the epoch; None: for ever."""
    renewed: float | None = None
    """On Kubernetes: when it was renewed last, in seconds since the epoch; None: by an older version."""
    ended: bool = False
    """No process works on the run any more."""
    kept: bool = False
    """The run was cleaned up, and its results are kept until ``until``. If ``ended`` is false: this time is
    over, and a process removes the run, or was killed when it did so."""
    holder: ProcessHandle | None = None
    """The process that runs all verbs: its death frees the lease. None: several processes work in turn."""

    def held(self, now: float) -> bool:
        """Whether a process works on the run, or will do so; ``now`` in seconds since the epoch.

        A holder that cannot be seen from here counts as alive. False also if ``until`` is None: the run is
        kept for ever, and no process works on it.
        """
        if self.ended or self.until is None or self.until <= now:
            return False
        return self.holder is None or process.is_alive(self.holder) is not False

    def held_by_another(self, now: float) -> bool | None:
        """Whether another process runs all verbs of the run; ``now`` in seconds since the epoch.

        True: another live process holds the lease. False: the lease is over, its holder is dead or is this
        process, or it has no holder, because several processes work on the run in turn. None: the holder is
        in another place, such as another machine, so this process cannot see whether it lives.
        """
        if self.holder is None or not self.held(now) or process.is_this_process(self.holder):
            return False
        return process.is_alive(self.holder)

    def over(self, now: float) -> bool:
        """Whether the lease's time is over, so that others may remove the run; its holder does not count."""
        return self.until is not None and self.until <= now

    def no_longer_kept(self, now: float) -> bool:
        """Whether the run was kept, and its keep time is over; True also while a process removes it."""
        # Kept and not ended: a process removes it, or did so until it was killed (`held_by`).
        return self.kept and (self.over(now) or not self.ended)


def from_annotations(meta: Mapping[str, Any]) -> Lease:
    """Read the lease from the annotations in a ledger's metadata.

    If a value is invalid, manycpu did not write it: return a lease that never ends, so that the run is kept.
    """
    annotations = meta.get("annotations") or {}
    texts = {name: annotations.get(key) for name, key in _ANNOTATIONS.items()}
    try:
        return Lease(
            until=texts["until"],
            renewed=texts["renewed"],
            ended=texts["ended"] is not None,
            kept=texts["kept"] is not None,
            holder=ProcessHandle.model_validate_json(texts["holder"]) if texts["holder"] else None,
        )
    except ValueError:
        return Lease()


def to_annotations(**fields: Any) -> dict[str, str | None]:
    """Return the given fields of a lease as annotations; None: the patch must remove this annotation."""
    lease = Lease(**fields)
    texts = {
        "until": None if lease.until is None else f"{lease.until:.0f}",
        "renewed": None if lease.renewed is None else f"{lease.renewed:.0f}",
        "ended": "true" if lease.ended else None,
        "kept": "true" if lease.kept else None,
        "holder": lease.holder.model_dump_json() if lease.holder else None,
    }
    # Only the fields that were given: the other annotations stay as they are.
    return {_ANNOTATIONS[name]: texts[name] for name in fields}


def renewal_pause() -> float:
    """Choose the seconds until the next renewal, with jitter that spreads the renewals of many runs."""
    return random.uniform(0.5, 1.5) * RENEW_INTERVAL_S  # noqa: S311 - spreads load


class Ledger(ABC):
    """The ledger of one run, which several processes may update.

    All methods but ``open``, ``exists`` and ``identity`` raise RunGoneError if the run has not begun, or is
    cleaned up.
    """

    _unseen_timeout_s: ClassVar[float] = math.inf
    """A holder that cannot be seen from here is presumed dead so many seconds after its last renewal."""
    location: tuple[str, ...] = ()
    """The options with which a command finds the run."""

    @abstractmethod
    def open(self, entry: Entry) -> Entry:
        """Create the ledger with an entry, or continue with the one that exists; return its entry."""

    @abstractmethod
    def exists(self) -> bool:
        """Whether the run has begun, and has not been cleaned up."""

    @abstractmethod
    def read(self) -> Entry:
        """Read the entry.

        Raises:
            LedgerError: Another version wrote it.
        """

    @abstractmethod
    def identity(self) -> str:
        """Return what distinguishes this ledger from others of its name, which are elsewhere, or later.

        Empty: an older version made it, or it is gone and this object has not read it before.
        """

    @abstractmethod
    def update(self) -> AbstractContextManager[Entry]:
        """Change the entry in a ``with`` block; its changes are recorded at the end."""

    @abstractmethod
    def lease(self) -> Lease:
        """Read the lease of the run."""

    @abstractmethod
    def change_lease(self, only_if: Callable[[Lease], bool] | None = None, **fields: Any) -> bool:
        """Change fields of the lease; the others stay as they are.

        Args:
            only_if: Called with the present lease, which no other process changes before this change.
            fields: The new values.

        Returns:
            Whether the fields were changed; False: ``only_if`` returned False.

        Raises:
            ForeignRunError: ``holder`` is given, and another process holds the run.
        """

    def now(self) -> float:
        """Return the present time by the clock that leases use, in seconds since the epoch."""
        return time.time()

    def take_up(self, seconds: float = LEASE_S) -> None:
        """Begin a lease that lasts ``seconds`` from now on, also of a run that has ended or is kept."""
        self.change_lease(until=self.now() + seconds, ended=False, kept=False)

    def renew(self, seconds: float = LEASE_S) -> None:
        """Renew the lease: from now on it lasts ``seconds``. A lease that has ended stays ended."""
        if not self.lease().ended:
            self.take_up(seconds)

    def refuse_second_holder(self, lease: Lease | None = None) -> None:
        """Raise if another process runs all verbs of this run: two such processes would both clean up.

        ``lease``: the run's lease, if the caller has read it; None: it is read here.

        Raises:
            ForeignRunError: Another process does so, or may do so in a place that cannot be seen from here.
        """
        lease = lease or self.lease()
        now = self.now()
        is_held = lease.held_by_another(now)
        if lease.holder is None or is_held is False:
            return
        run = lease.holder.run
        location = "".join(f" {shlex.quote(word)}" for word in self.location)
        if is_held:
            raise ForeignRunError(
                f"process {lease.holder.pid} of this machine works on run {run}",
                fix=f"`manycpu logs --follow {run}{location}` follows it, "
                f"`manycpu cancel {run}{location}` ends it; or give another run id",
            )
        # None: the holder cannot be seen from here. It is presumed dead once it has not renewed for long; the
        # holder of an older version, which recorded no renewal, at once.
        timeout = self._unseen_timeout_s
        if now - (lease.renewed or 0) >= timeout:
            return
        wait = f"; or wait {timeout / 60:.0f} minutes after its end" if math.isfinite(timeout) else ""
        raise ForeignRunError(
            f"{lease.holder} works on run {run}, or did so until it was killed: "
            "that cannot be seen from here",
            fix=f"See there. If that place is gone for good, say so: "
            f"manycpu cancel {run} --gone{location}{wait}; or give another run id",
        )

    def keep(self, seconds: float | None, *, only_over: bool = False) -> None:
        """Release the lease, and record for how many seconds the run is kept; None: for ever.

        ``only_over``: if the lease is not over, because another process renewed it, change nothing.
        """
        now = self.now()
        until = None if seconds is None else now + seconds
        may_change = (lambda lease: lease.over(now)) if only_over else None
        self.change_lease(only_if=may_change, until=until, ended=True, kept=True, holder=None)

    @contextmanager
    def held_by(self, holder: ProcessHandle, found: Lease) -> Iterator[None]:
        """Make ``holder`` hold the lease while the ``with`` block removes the run; then restore the lease.

        ``found`` is the lease as the caller has read it, and is restored after the block. If the block itself
        changes the lease, such as by :meth:`keep`, that change stays. On a full disk no process can change a
        lease: then the block runs without holding it.

        Raises:
            ForeignRunError: The lease is no longer as ``found``: another process has taken up the run.
        """
        now = self.now()
        lease_while_held = {"until": now + LEASE_S, "renewed": now, "ended": False, "holder": holder}
        try:
            # If this process is killed, `kept` without `ended` still shows that the keep time is over.
            if not self.change_lease(
                only_if=lambda lease: lease == found, kept=found.no_longer_kept(now), **lease_while_held
            ):
                raise ForeignRunError("another process has taken up the run", fix="See `manycpu status`")
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
        try:
            yield
        finally:
            with suppress(OSError, ManycpuError):  # such as RunGoneError: the block has removed the run
                # Not if the lease has another holder, or none: then the block changed it, or never held it.
                self.change_lease(only_if=lambda lease: lease.holder == holder, **dict(found))

    @contextmanager
    def kept_alive(self, seconds: float = LEASE_S) -> Iterator[None]:
        """Renew the lease while the block works on the run; it then lasts ``seconds`` from each renewal.

        A renewal that fails is skipped: the next one comes long before the lease ends. If the lease cannot be
        taken up at the start, the next renewal does so.

        Raises:
            RunGoneError: The run is gone at the start.
        """
        ended = threading.Event()
        renew = self.renew

        def renew_until_ended() -> None:
            """Run in a thread: renew at intervals; once one try has succeeded, by :meth:`renew`."""
            nonlocal renew
            while not ended.wait(renewal_pause()):
                with suppress(OSError, ManycpuError):  # if the run is gone, the block's own calls fail too
                    renew(seconds)
                    renew = self.renew

        try:
            self.take_up(seconds)
        except RunGoneError:
            raise
        except (OSError, ManycpuError):
            renew = self.take_up  # the lease may have ended before, and `renew` leaves an ended one as it is
        renewal = threading.Thread(target=renew_until_ended, daemon=True)
        renewal.start()
        try:
            yield
        finally:
            ended.set()
            renewal.join(_JOIN_TIMEOUT_S)

    @contextmanager
    def timed(self, verb: str, lease: float = LEASE_S) -> Iterator[VerbRecord]:
        """Run the ``with`` block as a verb: renew the lease, and record the result and the seconds.

        The recorded seconds are those of all tries of the verb. The block receives the record, and may change
        its result. An error of the block is recorded as a failure, and raised again. ``lease``: for how many
        seconds each renewal extends the lease.
        """
        record = VerbRecord(seconds=0, result="done")
        started = time.monotonic()

        def save() -> None:
            """Add the seconds of earlier tries, and write the record, unless the run is cleaned up."""
            record.seconds = time.monotonic() - started
            if self.exists():
                with self.update() as entry:
                    if earlier_record := entry.verbs.get(verb):
                        record.seconds += earlier_record.seconds
                    entry.verbs[verb] = record

        try:
            with self.kept_alive(lease):
                yield record
        except (ForeignRunError, UnseenError):
            raise  # not recorded as a failure of the verb: another process may work on the run
        except BaseException as error:
            record.result, record.error = "failed", recordable(str(error)) or type(error).__name__
            record.cancelled = isinstance(error, CancelledError)
            with suppress(OSError, ManycpuError):  # such as a full disk: the first error says more
                save()
            raise
        save()
