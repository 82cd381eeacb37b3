"""Record what a job's ranks reported and how far its logs were read, in the ledger: logs do not stay."""

import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from pydantic import BaseModel, Field

from manycpu.pipeline.ledger import Entry
from manycpu.pipeline.observed import Observer
from manycpu.pipeline.spec.errors import InvalidError
from manycpu.pipeline.spec.event_types import Event, ExitEvent, ProofEvent, decode
from manycpu.pipeline.spec.events import RankLine
from manycpu.pipeline.spec.handle import JobHandle
from manycpu.pipeline.spec.observed import Observed
from manycpu.pipeline.spec.state import RankFailure, RunState, Status
from manycpu.pipeline.targets.kubernetes.context import ClusterContext
from manycpu.pipeline.targets.kubernetes.following import state_packing
from manycpu.pipeline.targets.kubernetes.following.budgets import RankActivity

__all__ = ["TAIL", "WIDTH", "AttemptRecorder", "AttemptState", "Cursor", "Line", "LogBatch", "attempt_state"]

Cursor = dict[str, list[Any]]
"""``pod uid/container/number of its restart`` -> state of a Position."""
SAVE_EVERY = 30.0  # seconds: at most so much is passed on twice after a kill
TAIL = 20  # lines
WIDTH = 2000  # characters of each
_CLOCKS = 2.0  # seconds: the cluster's times are whole ones, and of several clocks
_TAKEN_BACK = 60.0  # seconds after a suspension in which its operator has surely deleted the pods
_NEVER = (0.0, "")
_STARTS = 3  # of a container, whose positions are kept: the log of the last but one can still be read


class Line(NamedTuple):
    """A line of a container, and where it stood."""

    line: RankLine
    time: float
    """Seconds since the epoch."""
    pod: str


class LogBatch(NamedTuple):
    """Lines of one container, and the position in its log after them."""

    log: str
    """Key of the cursor."""
    lines: list[Line]
    position: list[Any]


class AttemptState(BaseModel):
    """What the ledger keeps of an attempt."""

    attempt: int
    by: str = ""
    """Who has passed on the lines up to the cursor."""
    cursor: Cursor = Field(default_factory=dict)
    observed: Observed = Field(default_factory=Observed)
    began: float = 0.0
    """When the run had its nodes, later by as long as it had none again; seconds since the epoch."""
    paused: float = 0.0
    """Since when it is suspended; 0 while it has nodes."""
    admitted: float = 0.0
    """When its job went on last, after it had been suspended."""
    preempted: float = 0.0
    """When its nodes were last taken back: earlier meetings count no more."""
    spoke: float = 0.0
    """When any rank spoke last."""
    parted: dict[str, float] = Field(default_factory=dict)
    """Pod -> when a rank of it last reported its own end."""
    ended: float = 0.0
    verdict: Status | None = None
    """How it ended, as whoever followed it to its end saw it."""

    def begin(self, capacity: float, admitted: float, now: float) -> None:
        """Record when the run had its nodes, for the first time or again.

        Args:
            capacity: When it had them.
            admitted: When its job went on last, after it had been suspended; 0 where it never was.
            now: Seconds since the epoch.
        """
        if self.began and capacity < self.paused - _CLOCKS:  # those that it had before
            if now - max(self.paused, admitted) > _TAKEN_BACK:  # and which nobody took back
                self.paused, self.admitted = 0.0, admitted
            return
        if self.began and (self.paused or admitted > self.admitted):
            # Where nobody saw since when it was suspended, its time begins anew.
            self.began = self.began + max(0.0, capacity - self.paused) if self.paused else capacity
            self.preempted = self.paused or admitted
            self.observed.forget_failure(before=capacity)
        self.began, self.paused, self.admitted = self.began or capacity, 0.0, admitted

    def pause(self, since: float) -> bool:
        """Record that the run is suspended, and waits; whether it had its nodes before."""
        had_nodes = bool(self.began) and not self.paused
        self.paused = self.paused or since
        return had_nodes

    @property
    def succeeded(self) -> Status | None:
        """The verdict where it is a success: it stays one, also where its job is deleted after that."""
        verdict = self.verdict
        return verdict if verdict is not None and verdict.state is RunState.SUCCEEDED else None

    @property
    def activity(self) -> RankActivity:
        """What the budgets depend on."""
        met = self.observed.met and self.observed.met_last >= self.preempted
        finished = self.spoke if self.observed.finished else 0.0
        return RankActivity(met, self.spoke, self.began, paused=self.paused, finished=finished)


class AttemptRecorder:
    """Collects what the ranks of an attempt report, and writes it to the ledger.

    Args:
        ctx: The run.
        handle: The attempt's handle.
        cursor: How far its logs were read; None: nothing was.
        by: Who passes them on. Whoever did before under the same name is followed.
    """

    def __init__(self, ctx: ClusterContext, handle: JobHandle, cursor: Cursor | None, by: str) -> None:
        self._ctx, self._handle = ctx, handle
        entry = ctx.ledger.read()
        self.state = attempt_state(entry, handle)
        if not by or self.state.by != by:
            # Whoever follows anew tells all; what the ranks said of themselves is known already.
            self.state.cursor = dict(cursor or {})
        self.state.by = by
        self._observer = Observer(self.state.observed)
        self.tails: dict[str, list[str]] = {}
        """Pod -> its last lines."""
        self.spoken = bool(self.state.spoke)
        self.stood = 0.0
        """When it was last seen with its nodes, or suspended; seconds since the epoch."""
        self._introduced: dict[int, tuple[float, str]] = {}  # rank -> when it did so last, and its pod
        self.since = 0.0
        """Since when somebody listens to the ranks, without a break; seconds since the epoch."""
        self._saved, self._pressing = time.monotonic(), False
        self._written = entry.observed
        self.recorded_cursor: Cursor = dict(self.state.cursor)
        """How far what the ledger holds goes."""

    @property
    def activity(self) -> RankActivity:
        """What the budgets depend on."""
        return self.state.activity._replace(since=self.since, stood=self.stood)

    def hear(self, log_batches: Iterable[LogBatch]) -> None:
        """Record the lines of log batches, which were told: nobody who goes on tells them again."""
        for log_batch in log_batches:
            for line in log_batch.lines:
                event = decode(line.line.text)
                if not self._is_of_another_pod(line, event):
                    self._pressing |= self._observer.hear(line.line, line.time)
                self._note(line, event)
            self._note_position(log_batch)

    def _note_position(self, log_batch: LogBatch) -> None:
        container, _, number = log_batch.log.rpartition("/")
        cursor = self.state.cursor
        cursor.pop(log_batch.log, None)  # the latest is last
        cursor[log_batch.log] = log_batch.position
        if number.isdecimal():
            cursor.pop(f"{container}/{int(number) - _STARTS}", None)

    def _is_of_another_pod(self, line: Line, event: Event | None) -> bool:
        """Whether it tells of the end of a rank that has begun anew in another pod."""
        if isinstance(event, ProofEvent) and line.time >= self._introduced.get(event.rank, _NEVER)[0]:
            self._introduced[event.rank] = line.time, line.pod
        if not isinstance(event, ExitEvent):
            return False
        rank = line.line.rank if event.rank is None else event.rank
        return rank is not None and self._introduced.get(rank, (0.0, line.pod))[1] != line.pod

    def _note(self, line: Line, event: Event | None) -> None:
        if line.line.rank is not None:
            self.spoken = True
            self.state.spoke = max(self.state.spoke, line.time)
        tail = self.tails.setdefault(line.pod, [])
        if isinstance(event, ExitEvent):
            self.state.parted[line.pod] = line.time
        if event is None:  # events are for the report, and not to be read
            tail.append(line.line.text[:WIDTH])
            del tail[:-TAIL]

    def fail(self, failure: RankFailure) -> None:
        """Record the rank that failed first, where it could not report so itself."""
        self.state.observed.failure = failure

    @property
    def due(self) -> bool:
        """Whether the ledger is to be written: at once after what the report is made of."""
        return self._pressing or time.monotonic() - self._saved > SAVE_EVERY

    def fields(self) -> dict[str, Any]:
        """Build the fields to write to the ledger."""
        self._saved, self._pressing = time.monotonic(), False
        return self.state.model_dump(mode="json", exclude_defaults=True)

    def write(self, fields: dict[str, Any]) -> None:
        """Write the ledger, unless nothing is new or the run has gone on to another attempt.

        Where the ledger takes no more, the least is written: that there is much to say voids no success.

        Raises:
            ClusterError: The cluster refuses it, or does not answer.
            FileNotFoundError: The run is cleaned up.
        """
        packed = state_packing.pack(fields)
        if packed != self._written:  # as of few who wait, of whom there may be a thousand
            self._put_as_it_fits(packed, fields)
            self._written = packed
        self.recorded_cursor = fields.get("cursor", {})

    def _put_as_it_fits(self, packed: dict[str, Any], fields: dict[str, Any]) -> None:
        try:
            self._put(packed)
        except InvalidError:  # too large, most likely
            self._put(state_packing.least(fields))

    def _put(self, written: dict[str, Any]) -> None:
        with self._ctx.ledger.update() as entry:
            if entry.attempt == self._handle.attempt:
                entry.observed = written


def attempt_state(entry: Entry, handle: JobHandle) -> AttemptState:
    """Read an attempt's state from the ledger; empty where an older version wrote what it should not."""
    if entry.observed is not None and entry.observed.get("attempt") == handle.attempt:
        with suppress(ValueError):
            return AttemptState.model_validate(state_packing.unpack(entry.observed))
    return AttemptState(attempt=handle.attempt)
