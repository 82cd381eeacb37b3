"""Record in the ledger what a job's ranks reported and how far its logs were read, as logs do not last."""

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
LIMIT: Final = 400_000  # maximum number of characters of the packed text
_MAX_UNPACKED: Final = 32_000  # characters of JSON: a larger state is packed
# The next three numbers apply if the packed state is too large with everything.
_KEPT_ROUNDS: Final = 8  # number of the last meetings to keep
_KEPT_ENTRIES: Final = 4096  # number of the last entries to keep of other lists
_KEPT_POINTS: Final = 40  # number of points to keep of each curve


def pack(fields: Fields) -> Fields:
    """Return an attempt's fields in the form for the ledger: as they are, or compressed if they are large.

    If the compressed text is larger than ``LIMIT``, details are dropped, the oldest first. The shortest form
    is returned even if it is still larger.

    Args:
        fields: The fields of an ``AttemptState``: ``attempt``, ``cursor``, ``observed`` and more.
    """
    plain = json.dumps(fields)
    if len(plain) <= _MAX_UNPACKED:
        return fields
    for shorten in _WAYS_TO_SHORTEN:
        packed = _compressed(shorten(fields))
        if len(packed) <= LIMIT:
            break
    return {"attempt": fields["attempt"], "packed": packed}


def pack_only_the_end(fields: Fields) -> Fields:
    """Pack only the fields that say how an attempt ended, for a ledger that has no room for more."""
    return {"attempt": fields["attempt"], "packed": _compressed(_only_the_end(fields))}


def unpack(written: Mapping[str, Any]) -> Fields:
    """Return the fields again that :func:`pack` or :func:`pack_only_the_end` packed.

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
    """Compress fields to a text in base64; the ranks of each round become spans of first and last rank."""
    rounds = [meeting | {"ranks": _to_spans(meeting["ranks"])} for meeting in _rounds(fields)]
    text = json.dumps(_with_rounds(fields, rounds))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def _without_the_oldest(fields: Fields) -> Fields:
    """Keep only the last meetings, the last entries of growing lists, and some points of each curve."""
    observed = fields.get("observed", {})
    last_entries = {
        name: observed[name][-_KEPT_ENTRIES:] for name in ("introduced", "warnings") if name in observed
    }
    cursor = dict([*fields.get("cursor", {}).items()][-_KEPT_ENTRIES:])  # the logs that were read last
    curves = {
        name: Series(**series).thinned(_KEPT_POINTS) for name, series in observed.get("series", {}).items()
    }
    thinned = {"series": {name: curve.model_dump() for name, curve in curves.items()}}
    shortened = fields | {"cursor": cursor, "observed": observed | last_entries | thinned}
    return _with_rounds(shortened, _rounds(shortened)[-_KEPT_ROUNDS:])


def _only_the_last_meeting(everything: Fields) -> Fields:
    """Keep only the last meeting, without log positions and the times of ranks' proofs and ends."""
    fields = _without_the_oldest(everything)
    observed = {name: value for name, value in fields.get("observed", {}).items() if name != "introduced"}
    shortened = fields | {"cursor": {}, "parted": {}, "observed": observed}
    return _with_rounds(shortened, _rounds(shortened)[-1:])


def _only_the_end(fields: Fields) -> Fields:
    """Keep only the last meeting, without metrics, warnings and failure; the output has the metrics, too."""
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
"""Functions that shorten fields, each more than the one before; the first one drops nothing."""


def _rounds(fields: Fields) -> list[Fields]:
    """Return the rounds of an attempt: each is a meeting of all ranks, at a start or a restart."""
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
"""``pod uid/container/number of restarts`` -> state of a ``LogCursor``, and a mark if the log was read."""
SAVE_INTERVAL_S = 30.0  # between two saves; after a kill, the lines of this time may be delivered twice
TAIL = 20  # number of the last lines to keep of each pod
WIDTH = 2000  # number of characters to keep of each of these lines
_CLOCK_TOLERANCE_S = 2.0  # the cluster's times are whole seconds, from several clocks
_PODS_DELETED_S = 60.0  # this long after a suspension, the operator has surely deleted the pods
_KEPT_STARTS = 3  # number of starts of a container whose log positions are kept; the kubelet keeps two logs


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
    """When the run got its nodes, plus all time that it was suspended since; 0: not recorded yet."""
    watched_since: float = 0.0
    """Since when the follower has watched the pods without a break: earlier silence proves nothing."""
    paused: float = 0.0
    """When the present suspension began, in which only ``queue_timeout`` counts; 0: it is not suspended."""
    last_placed_or_suspended: float = 0.0
    """When the follower last saw the job with its nodes, or suspended; 0: it never did."""
    finished: float = 0.0
    """If all ranks of the last meeting have ended with 0: when a rank last wrote a line; else 0."""


class AttemptState(BaseModel):
    """The state of an attempt that the ledger keeps."""

    attempt: int
    by: str = ""
    """Name of the reader that has delivered the lines up to the cursor; empty: it has none."""
    cursor: Cursor = Field(default_factory=dict)
    observed: Observed = Field(default_factory=Observed)
    began: float = 0.0
    """When the run got its nodes, plus all time that it was suspended since; in seconds since the epoch."""
    paused: float = 0.0
    """When the present suspension began; 0: the run is not suspended."""
    admitted: float = 0.0
    """When the operator had last suspended or resumed the job at the last :meth:`begin`; 0: never."""
    preempted: float = 0.0
    """When a suspension last took the run's nodes: earlier meetings no longer count."""
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
            # The pods got these nodes before the suspension, and the operator has not deleted them yet.
            # (Without a suspension, `paused` is 0, and the condition is false.)
            if now - max(self.paused, admitted) > _PODS_DELETED_S:  # it will not: the run kept its nodes
                self.paused = 0.0
                self.admitted = admitted
            return
        if not self.began:
            self.began = placed_at
        elif self.paused:  # a suspension has ended: the time without nodes does not count
            self.began += max(0.0, placed_at - self.paused)
            self._forget_before_suspension(self.paused, placed_at)
        elif admitted > self.admitted:  # no follower saw when the suspension began: run_timeout starts again
            self.began = placed_at
            self._forget_before_suspension(admitted, placed_at)
        self.paused = 0.0
        self.admitted = admitted

    def _forget_before_suspension(self, suspended_at: float, placed_at: float) -> None:
        """Ignore meetings before the suspension, and failures before the run got its nodes again."""
        self.preempted = suspended_at
        self.observed.forget_failure(until=placed_at)  # the suspension ended the ranks

    @property
    def has_nodes(self) -> bool:
        """Whether the run got its nodes, and no suspension has taken them since."""
        return bool(self.began) and not self.paused

    def pause(self, since: float) -> None:
        """Record that a suspension began at ``since``, unless the run is recorded as suspended already."""
        self.paused = self.paused or since

    @property
    def succeeded(self) -> Status | None:
        """The verdict if it is a success, else None. A success stands even if the job is deleted later."""
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
        cursor: How far the logs were read; None: read from the beginning.
        reader: Name of the reader that delivers the lines; empty: it has none. If the ledger has a cursor of
            the reader with this name, that one is used instead of ``cursor``.
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
        """Rank -> time and pod of the last event with which the rank proved that it takes part."""
        self.watched_since = 0.0
        """Since when the follower has watched the pods without a break; seconds since the epoch."""
        self._last_save = time.monotonic()
        """When :meth:`fields` was last called; by the monotonic clock."""
        self._has_important_event = False
        """Whether an important event was recorded since the last save."""
        self._last_written = entry.observed
        """The packed fields that were written last or, before the first write, found in the ledger.

        None: there are none. If the ledger refused their size, the ledger has only the end instead.
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
            cursor.pop(log_batch.log, None)  # so that it becomes the last entry: `pack` keeps the last ones
            cursor[log_batch.log] = log_batch.position
            # Keep the log positions of only the last few starts of a container.
            container, _, restarts = log_batch.log.rpartition("/")
            if restarts.isdecimal():
                cursor.pop(f"{container}/{int(restarts) - _KEPT_STARTS}", None)

    def _record_line(self, line: Line) -> None:
        """Record a line: the event in it, its time, and its text as one of the last lines of its pod."""
        event = decode(line.line.text)
        if isinstance(event, ProofEvent):  # the rank introduces itself: it runs in this pod now
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
        tail = self.tails.setdefault(line.pod, [])  # also for an event: it shows that the pod's log was read
        if event is None:  # the last lines are for people, who do not read events
            tail.append(line.line.text[:WIDTH])
            del tail[:-TAIL]

    def _is_end_in_earlier_pod(self, line: Line, event: Event | None) -> bool:
        """Whether a line reports the end of a rank that has since started again in another pod."""
        if not isinstance(event, ExitEvent):
            return False
        rank = line.line.rank if event.rank is None else event.rank
        if rank not in self._introduced:  # this recorder has received no proof of the rank
            return False
        _, present_pod = self._introduced[rank]
        return line.pod != present_pod

    def record_failure(self, failure: RankFailure) -> None:
        """Record a failure that the rank itself could not report: that of the rank that failed first."""
        self.state.observed.failure = failure

    @property
    def due(self) -> bool:
        """Whether to write the ledger now: after an important event, or if the last save is old."""
        return self._has_important_event or time.monotonic() - self._last_save > SAVE_INTERVAL_S

    def fields(self) -> dict[str, Any]:
        """Return the fields to write to the ledger; the time until the next save begins again."""
        self._last_save = time.monotonic()
        self._has_important_event = False
        return self.state.model_dump(mode="json", exclude_defaults=True)

    def write(self, fields: dict[str, Any]) -> None:
        """Write the fields to the ledger, unless they are unchanged or another attempt has begun.

        If the ledger refuses their size, write only how the attempt ended: too much data must not turn a
        success into a failure.

        Raises:
            ClusterError: The cluster refuses the change, or does not answer.
            FileNotFoundError: The run is cleaned up.
        """
        packed = pack(fields)
        if packed != self._last_written:  # saves writes: a thousand runs may wait without a change
            try:
                self._write_entry(packed)
            except InvalidError:  # the ledger is too large, most likely
                self._write_entry(pack_only_the_end(fields))
            self._last_written = packed
        self.recorded_cursor = fields.get("cursor", {})

    def _write_entry(self, written: dict[str, Any]) -> None:
        """Write packed fields to the ledger, unless another attempt has begun."""
        with self._ctx.ledger.update() as entry:
            if entry.attempt == self._handle.attempt:
                entry.observed = written


def attempt_state(entry: Entry, handle: JobHandle) -> AttemptState:
    """Read an attempt's state from the ledger; an empty state if none is recorded or it cannot be read."""
    if entry.observed is not None and entry.observed.get("attempt") == handle.attempt:
        with suppress(ValueError):
            return AttemptState.model_validate(unpack(entry.observed))
    return AttemptState(attempt=handle.attempt)
