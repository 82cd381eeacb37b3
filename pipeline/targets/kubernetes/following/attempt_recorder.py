"""Record in the ledger what a job's ranks reported and how far its logs were read: logs do not last."""

import base64
import json
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

from pydantic import BaseModel, Field

from manycpu.pipeline.ledger import Entry
from manycpu.pipeline.observed import Observer
from manycpu.pipeline.spec.errors import InvalidError
from manycpu.pipeline.spec.event_types import Event, ExitEvent, ProofEvent, decode
from manycpu.pipeline.spec.events import RankLine
from manycpu.pipeline.spec.handle import JobHandle
from manycpu.pipeline.spec.observed import Observed, Series
from manycpu.pipeline.spec.state import RankFailure, RunState, Status
from manycpu.pipeline.targets.kubernetes.context import ClusterContext

Fields = dict[str, Any]
"""The fields of an ``AttemptState`` as JSON values; packed, they are ``attempt`` and a compressed text."""
LIMIT: Final = 400_000  # characters of the packed state
_PLAIN: Final = 32_000  # characters of JSON: a larger state is packed
_ROUNDS: Final = 8  # number of last meetings to keep, if all are too large
_ENTRIES: Final = 4096  # number of last entries to keep of other lists, likewise
_POINTS: Final = 40  # number of points to keep of a curve, likewise


def pack(fields: Fields) -> Fields:
    """Return an attempt's fields in the form for the ledger: compressed if they are large.

    If they are too large even so, details are dropped, the oldest first. The last and shortest form is
    returned whatever its size.

    Args:
        fields: Of an ``AttemptState``: ``attempt``, ``cursor``, ``observed`` and more.
    """
    plain = json.dumps(fields)
    if len(plain) <= _PLAIN:
        return fields
    for shorten in _WAYS_TO_SHORTEN:
        packed = _compressed(shorten(fields))
        if len(packed) <= LIMIT:
            break
    return {"attempt": fields["attempt"], "packed": packed}


def pack_only_the_end(fields: Fields) -> Fields:
    """Pack only how an attempt ended, for a ledger that has no room for more."""
    return {"attempt": fields["attempt"], "packed": _compressed(_only_the_end(fields))}


def unpack(written: Mapping[str, Any]) -> Fields:
    """Return the fields from what :func:`pack` or :func:`pack_only_the_end` returned.

    Raises:
        ValueError: The packed text cannot be read.
    """
    if "packed" not in written:
        return dict(written)
    try:
        fields: Fields = json.loads(zlib.decompress(base64.b64decode(written["packed"])))
        rounds = [meeting | {"ranks": _from_spans(meeting["ranks"])} for meeting in _rounds(fields)]
        return _with_rounds(fields, rounds)
    except (zlib.error, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"what the ledger holds of the ranks cannot be read: {error}") from error


def _compressed(fields: Fields) -> str:
    """Compress fields to text in base64; the ranks of each round become spans of first and last rank."""
    rounds = [meeting | {"ranks": _to_spans(meeting["ranks"])} for meeting in _rounds(fields)]
    text = json.dumps(_with_rounds(fields, rounds))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def _without_the_oldest(fields: Fields) -> Fields:
    """Keep only the last meetings, the last entries of growing lists, and some points of each curve."""
    observed = fields.get("observed", {})
    last_entries = {
        name: observed[name][-_ENTRIES:] for name in ("introduced", "warnings") if name in observed
    }
    cursor = dict([*fields.get("cursor", {}).items()][-_ENTRIES:])  # the logs that were read last
    curves = {name: Series(**series).thinned(_POINTS) for name, series in observed.get("series", {}).items()}
    thinned = {"series": {name: curve.model_dump() for name, curve in curves.items()}}
    shortened = fields | {"cursor": cursor, "observed": observed | last_entries | thinned}
    return _with_rounds(shortened, _rounds(shortened)[-_ROUNDS:])


def _only_the_last_meeting(everything: Fields) -> Fields:
    """Keep only the last meeting, without log positions and the times of ranks' proofs and ends."""
    fields = _without_the_oldest(everything)
    observed = {name: value for name, value in fields.get("observed", {}).items() if name != "introduced"}
    shortened = fields | {"cursor": {}, "parted": {}, "observed": observed}
    return _with_rounds(shortened, _rounds(shortened)[-1:])


def _only_the_end(fields: Fields) -> Fields:
    """Keep only the last meeting, without metrics, warnings and failure: the output has the metrics too."""
    dropped = {"metrics", "series", "warnings", "failure"}
    shortened = _only_the_last_meeting(fields)
    observed = {name: value for name, value in shortened["observed"].items() if name not in dropped}
    return shortened | {"observed": observed}


_WAYS_TO_SHORTEN: Final[tuple[Callable[[Fields], Fields], ...]] = (
    dict,
    _without_the_oldest,
    _only_the_last_meeting,
    _only_the_end,
)
"""Each drops more than the one before, the first drops nothing; :func:`pack` stops when it is enough."""


def _rounds(fields: Fields) -> list[Fields]:
    """Return the rounds of the ranks: each is a meeting of all ranks, at a start or a restart."""
    return list(fields.get("observed", {}).get("rounds", ()))


def _with_rounds(fields: Fields, rounds: list[Fields]) -> Fields:
    """Return the fields with these rounds; without rounds, the fields as they are."""
    if not rounds:
        return fields
    return fields | {"observed": fields.get("observed", {}) | {"rounds": rounds}}


def _to_spans(ranks: Iterable[int]) -> list[list[int]]:
    """Convert ranks to spans of first and last rank: thousands of ranks are mostly one span."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return spans


def _from_spans(spans: Iterable[list[int]]) -> list[int]:
    """Convert spans of first and last rank to ranks."""
    return [rank for first, last in spans for rank in range(first, last + 1)]


Cursor = dict[str, list[Any]]
"""``pod uid/container/number of restarts`` -> state of a ``LogCursor``."""
SAVE_INTERVAL_S = 30.0  # between two saves; after a kill, the lines of this time may be delivered twice
TAIL = 20  # last lines to keep of each pod
WIDTH = 2000  # characters to keep of each last line
_CLOCK_TOLERANCE_S = 2.0  # the cluster's times are whole seconds, from several clocks
_PODS_DELETED_S = 60.0  # so long after a suspension, the operator has surely deleted the pods
_KEPT_STARTS = 3  # of a container, whose log positions are kept; the kubelet keeps the last two logs


class Line(NamedTuple):
    """A line of a container, with its time and its pod."""

    line: RankLine
    time: float
    """Seconds since the epoch."""
    pod: str


class LogBatch(NamedTuple):
    """Lines of one container, and the position in its log after them."""

    log: str
    """The log's key in the cursor."""
    lines: list[Line]
    position: list[Any]


class RankActivity(NamedTuple):
    """What the ranks have done so far. Times are seconds since the epoch, by the cluster's clocks."""

    met: bool = False
    """Whether the ranks have proved their scale."""
    last: float = 0.0
    """When any rank last wrote a line; 0: none has."""
    began: float = 0.0
    """When the run got its nodes, plus the time that it spent without them since; 0: not recorded yet."""
    watched_since: float = 0.0
    """Since when the follower watches the pods without a break: earlier silence proves nothing."""
    paused: float = 0.0
    """Since when the job is suspended, so that only ``queue_timeout`` counts; 0: it is not suspended."""
    last_placed_or_suspended: float = 0.0
    """When the follower last saw the job with its nodes, or suspended; 0: it never did."""
    finished: float = 0.0
    """When a rank last wrote a line, if all ranks of the last meeting have ended with 0; 0: they have not."""


class AttemptState(BaseModel):
    """The state of an attempt that the ledger keeps."""

    attempt: int
    by: str = ""
    """Name of the reader that has delivered the lines up to the cursor."""
    cursor: Cursor = Field(default_factory=dict)
    observed: Observed = Field(default_factory=Observed)
    began: float = 0.0
    """When the run got its nodes, plus the time that it spent without them since; seconds since the epoch."""
    paused: float = 0.0
    """Since when the run is suspended; 0: it is not suspended."""
    admitted: float = 0.0
    """When the operator last suspended or resumed the job, as of the last :meth:`begin`; 0: it never did."""
    preempted: float = 0.0
    """When the run last lost its nodes to a suspension: earlier meetings no longer count."""
    spoke: float = 0.0
    """When any rank last wrote a line."""
    parted: dict[str, float] = Field(default_factory=dict)
    """Pod -> when one of its ranks last reported its own end."""
    ended: float = 0.0
    """When the attempt ended; 0: it has not."""
    verdict: Status | None = None
    """The final status, as recorded by the follower that saw the end; None: there is none yet."""

    def begin(self, placed_at: float, admitted: float, now: float) -> None:
        """Record that the run has its nodes, for the first time or again.

        Args:
            placed_at: When the run got them.
            admitted: When the operator last suspended or resumed the job; 0: it never did.
            now: Seconds since the epoch.
        """
        if self.began and placed_at < self.paused - _CLOCK_TOLERANCE_S:
            # The pods got these nodes before the suspension: the operator has yet to delete them. (Without a
            # suspension `paused` is 0, and this is false.)
            if now - max(self.paused, admitted) > _PODS_DELETED_S:  # it never will: the run kept its nodes
                self.paused = 0.0
                self.admitted = admitted
            return
        if not self.began:
            self.began = placed_at
        elif self.paused:  # a suspension has ended: its time without nodes does not count
            self.began += max(0.0, placed_at - self.paused)
            self._forget_before_suspension(self.paused, placed_at)
        elif admitted > self.admitted:  # no follower saw when the suspension began: run_timeout starts again
            self.began = placed_at
            self._forget_before_suspension(admitted, placed_at)
        self.paused = 0.0
        self.admitted = admitted

    def _forget_before_suspension(self, suspended_at: float, placed_at: float) -> None:
        """Let earlier meetings no longer count, nor failures before the run got its nodes again."""
        self.preempted = suspended_at
        self.observed.forget_failure(until=placed_at)  # the suspension ended the ranks

    @property
    def has_nodes(self) -> bool:
        """Whether the run got its nodes, and no suspension has taken them since."""
        return bool(self.began) and not self.paused

    def pause(self, since: float) -> None:
        """Record that the run is suspended since a time, unless a suspension is recorded already."""
        self.paused = self.paused or since

    @property
    def succeeded(self) -> Status | None:
        """The verdict if it is a success, else None: a success stands even if the job is deleted later."""
        verdict = self.verdict
        return verdict if verdict is not None and verdict.state is RunState.SUCCEEDED else None

    @property
    def activity(self) -> RankActivity:
        """The activity of the ranks, on which the time budgets depend."""
        met = self.observed.met and self.observed.met_last >= self.preempted
        finished = self.spoke if self.observed.finished else 0.0
        return RankActivity(met, self.spoke, self.began, paused=self.paused, finished=finished)


class AttemptRecorder:
    """Collects what the ranks of an attempt report, and writes it to the ledger.

    Args:
        ctx: The run.
        handle: The attempt's handle.
        cursor: How far the logs were read; None: from the beginning.
        reader: Name of the reader that delivers the lines; empty: it has none. If a reader of this name
            delivered the recorded lines, the recorded cursor is used instead.
    """

    def __init__(self, ctx: ClusterContext, handle: JobHandle, cursor: Cursor | None, reader: str) -> None:
        self._ctx, self._handle = ctx, handle
        entry = ctx.ledger.read()
        self.state = attempt_state(entry, handle)
        """The state of the attempt; :meth:`fields` returns it for the ledger."""
        if not reader or self.state.by != reader:
            # A new reader delivers all lines from the given cursor on; what the ranks reported is kept.
            self.state.cursor = dict(cursor or {})
        self.state.by = reader
        self._observer = Observer(self.state.observed)
        self.tails: dict[str, list[str]] = {}
        """Pod -> its last lines."""
        self.last_placed_or_suspended = 0.0
        """When the follower last saw the job with its nodes, or suspended; seconds since the epoch."""
        self._introduced: dict[int, tuple[float, str]] = {}
        """Rank -> time and pod of its last proof that it takes part."""
        self.watched_since = 0.0
        """Since when the follower watches the pods without a break; seconds since the epoch."""
        self._last_save = time.monotonic()
        """When the fields were last taken for the ledger; by the monotonic clock."""
        self._has_important_event = False
        """Whether an important event was recorded since the last save."""
        self._last_written = entry.observed
        """The packed fields that were last written or, before the first write, found in the ledger.

        None: there are none. If the ledger refused their size, it has only the end.
        """
        self.recorded_cursor: Cursor = dict(self.state.cursor)
        """The cursor as last written to the ledger."""

    @property
    def activity(self) -> RankActivity:
        """The activity of the ranks and the follower, on which the time budgets depend."""
        return self.state.activity._replace(
            watched_since=self.watched_since, last_placed_or_suspended=self.last_placed_or_suspended
        )

    def record_delivered(self, log_batches: Iterable[LogBatch]) -> None:
        """Record lines and mark their batches delivered, so that a resumed follower does not repeat them."""
        for log_batch in log_batches:
            for line in log_batch.lines:
                self._record_line(line)
            cursor = self.state.cursor
            cursor.pop(log_batch.log, None)  # inserted again, as the last: `pack` keeps the last entries
            cursor[log_batch.log] = log_batch.position
            # Keep the positions in the logs of a container's last few starts only.
            container, _, restarts = log_batch.log.rpartition("/")
            if restarts.isdecimal():
                cursor.pop(f"{container}/{int(restarts) - _KEPT_STARTS}", None)

    def _record_line(self, line: Line) -> None:
        """Record a line: its event, when its rank wrote it, and as one of the last lines of its pod."""
        event = decode(line.line.text)
        if isinstance(event, ProofEvent):  # the rank introduces itself, in the pod where it now runs
            # The lines of several pods arrive in no particular order.
            time_before, _ = self._introduced.get(event.rank, (0.0, ""))
            if line.time >= time_before:
                self._introduced[event.rank] = line.time, line.pod
        if not self._is_end_in_earlier_pod(line, event):  # such an end says nothing about the rank now
            self._has_important_event |= self._observer.add_line(line.line, line.time)
        if line.line.rank is not None:
            self.state.spoke = max(self.state.spoke, line.time)
        if isinstance(event, ExitEvent):
            self.state.parted[line.pod] = line.time
        tail = self.tails.setdefault(line.pod, [])  # also without a text line: its pod's log was read
        if event is None:  # the last lines are for people, who do not read events
            tail.append(line.line.text[:WIDTH])
            del tail[:-TAIL]

    def _is_end_in_earlier_pod(self, line: Line, event: Event | None) -> bool:
        """Whether a line reports the end of a rank that has since started again in another pod."""
        if not isinstance(event, ExitEvent):
            return False
        rank = line.line.rank if event.rank is None else event.rank
        if rank not in self._introduced:  # no proof of it came since this recorder began
            return False
        _, present_pod = self._introduced[rank]
        return line.pod != present_pod

    def record_failure(self, failure: RankFailure) -> None:
        """Record the failure of the rank that failed first and could not report it."""
        self.state.observed.failure = failure

    @property
    def due(self) -> bool:
        """Whether to write the ledger now: after an important event, or if the last save is old."""
        return self._has_important_event or time.monotonic() - self._last_save > SAVE_INTERVAL_S

    def fields(self) -> dict[str, Any]:
        """Return the fields to write to the ledger, and restart the time until the next save."""
        self._last_save = time.monotonic()
        self._has_important_event = False
        return self.state.model_dump(mode="json", exclude_defaults=True)

    def write(self, fields: dict[str, Any]) -> None:
        """Write the fields to the ledger, unless they are unchanged or the run is at another attempt.

        If the ledger refuses their size, only how the attempt ended is written: too much data must not turn a
        success into a failure.

        Raises:
            ClusterError: The cluster refuses it, or does not answer.
            FileNotFoundError: The run is cleaned up.
        """
        packed = pack(fields)
        if packed != self._last_written:  # a thousand runs may wait, mostly without a change
            try:
                self._write_entry(packed)
            except InvalidError:  # the ledger is too large, most likely
                self._write_entry(pack_only_the_end(fields))
            self._last_written = packed
        self.recorded_cursor = fields.get("cursor", {})

    def _write_entry(self, written: dict[str, Any]) -> None:
        """Write packed fields to the ledger, unless the run is at another attempt."""
        with self._ctx.ledger.update() as entry:
            if entry.attempt == self._handle.attempt:
                entry.observed = written


def attempt_state(entry: Entry, handle: JobHandle) -> AttemptState:
    """Read an attempt's state from the ledger; an empty state if none is recorded or it cannot be read."""
    if entry.observed is not None and entry.observed.get("attempt") == handle.attempt:
        with suppress(ValueError):
            return AttemptState.model_validate(unpack(entry.observed))
    return AttemptState(attempt=handle.attempt)
