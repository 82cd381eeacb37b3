"""What is kept of the reports of a training's ranks: their state, and curves of their metrics.

>>> loss = Series()
>>> for step in range(100_000):
...     loss.add(step, 1.0 + step, 1 / (1 + step) if step != 70_000 else 9.0)
>>> len(loss.values) <= SERIES_LIMIT, loss.values[0], max(loss.values), loss.steps[-1]
(True, 1.0, 9.0, 99999)
"""

import math
from collections.abc import Mapping
from itertools import groupby, pairwise
from typing import Annotated, Any, Final, TypeGuard

from pydantic import AfterValidator, BaseModel, Field, model_validator

from manycpu.pipeline.spec.event_types import Event, MetricsEvent, PaceEvent, ProgressEvent, ResultEvent
from manycpu.pipeline.spec.state import RankFailure

SERIES_LIMIT: Final = 300
"""Points that a curve keeps."""
FIRST_METRICS: Final = ("loss", "learning_rate", "samples_per_second")
"""Metrics that people look at first."""
_PROGRESS_CURVES: Final = ("loss", "grad_norm", "learning_rate", "samples_per_second")


class Series(BaseModel):
    """A curve: the values of a metric in the order of their events, as columns of equal length.

    A curve with more than ``SERIES_LIMIT`` points is thinned: of each span of values with equal counts, only
    the least and the greatest one stay, so that the curve keeps its shape.
    """

    index: list[int] = Field(default_factory=list)
    """Number of each value among all values, from 0 on."""
    steps: list[int | float | None] = Field(default_factory=list)
    times: list[float] = Field(default_factory=list)
    """Seconds since the epoch, by the clock of the rank; 0: unknown."""
    values: list[int | float] = Field(default_factory=list)
    _rereading: bool = False

    @model_validator(mode="after")
    def _columns_have_equal_length(self) -> "Series":
        if len({len(self.index), len(self.steps), len(self.times), len(self.values)}) > 1:
            raise ValueError("the columns of a curve have different lengths")
        return self

    def add(self, step: float | None, time: float, value: Any, *, step_is_exact: bool = True) -> None:
        """Add a value, unless it is no finite number or was added before.

        A log may be read twice, and a script may report its last step once more at its end.

        Args:
            step: The step that it belongs to; None: unknown.
            time: When it was written, in seconds since the epoch; 0: unknown, and that of the value before
                is taken.
            value: The value.
            step_is_exact: False: the step depends on events that were read before, as that of a pace does.
        """
        if not is_finite(value):
            return
        if self._is_reread(time, value):
            # A later step than all is new, also after the clock was set back.
            is_new = step_is_exact and self._is_later(step)
            if not is_new:
                return
        if step is not None and self.values and (step, value) == (self.steps[-1], self.values[-1]):
            return  # the last step, reported once more
        if not time:
            time = self.times[-1] if self.times else 0.0
        self.index.append(self.index[-1] + 1 if self.index else 0)
        self.steps.append(step)
        self.times.append(time)
        self.values.append(value)
        if len(self.values) > SERIES_LIMIT:
            fewer_points = self.thinned(SERIES_LIMIT // 2)  # half: it is not too long again at once
            for name, column in fewer_points:
                setattr(self, name, column)

    def thinned(self, points: int) -> "Series":
        """Return a curve of at most ``points`` points (or four, if that is more).

        The first and the last point stay, and the least and the greatest value of each span of values. A
        curve that has no more than ``points`` is returned itself.
        """
        if len(self.values) <= points:
            return self
        span_count = max(1, (points - 2) // 2)  # two points of each span, besides the first and the last
        first = self.index[0]
        width = (self.index[-1] - first + 1) / span_count
        kept = {0, len(self.values) - 1}  # positions in the columns
        # Of each span, keep the least and the greatest value.
        for _, span in groupby(range(len(self.values)), key=lambda at: int((self.index[at] - first) / width)):
            positions = list(span)
            kept.add(min(positions, key=self.values.__getitem__))
            kept.add(max(positions, key=self.values.__getitem__))
        columns = self.model_dump()
        return Series(**{name: [column[at] for at in sorted(kept)] for name, column in columns.items()})

    def _is_later(self, step: float | None) -> bool:
        """Whether a step is greater than all before it.

        False if steps began again, as the last one is then not the greatest; also if no step is known.
        """
        known = [known for known in self.steps if known is not None]
        if step is None or not known:
            return False
        greatest = max(known)
        return step > greatest and self.steps[-1] == greatest

    def _is_reread(self, time: float, value: float) -> bool:
        """Whether a value was added before, because the log is being read a second time.

        A value without a time is new, and so is one that is later than the last point. A value that is not
        later was added before if a point has its time and value, or if values were thinned out at its time.
        Then the values that follow it were added before too (``_rereading``), up to the time of the last
        point. Any other value is new: the rank's clock was set back.
        """
        if not time or not self.times or time > self.times[-1]:
            self._rereading = False
            return False
        is_known = (time, value) in zip(self.times, self.values, strict=True)
        is_reread = self._rereading or is_known or self._is_thinned_at(time)
        self._rereading = is_reread and time < self.times[-1]  # for the next value
        return is_reread

    def _is_thinned_at(self, time: float) -> bool:
        """Whether values were left out between the two points that are around a time."""
        points = zip(self.times, self.index, strict=True)
        return any(
            time_a <= time <= time_b and index_b - index_a > 1
            for (time_a, index_a), (time_b, index_b) in pairwise(points)
        )


def values_of(
    event: Event, rank: int | None, last_reported_step: float | None
) -> tuple[float | None, Mapping[str, Any]]:
    """Return the step of an event, for curves, and its values: name of a metric -> value.

    A pace event is placed at the last step that the training reported: its own step counts only the steps of
    the rank's process, which may have been restarted. The step is None if it is unknown; the values are empty
    if the event has none.

    Args:
        event: The event.
        rank: The rank that reported it; of pace events only those of rank 0 have values.
        last_reported_step: The last step that the training reported; None: it reported none.
    """
    match event:
        case ProgressEvent():
            return event.step, {name: getattr(event, name) for name in _PROGRESS_CURVES}
        case MetricsEvent():
            return event.step, event.values
        case PaceEvent() if rank == 0:
            step = event.step if last_reported_step is None else last_reported_step
            return step, {"step_seconds": event.step_seconds}
    return None, {}


def is_finite(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number, which a curve can have."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer larger than any float
        return False


class Pace(BaseModel):
    """How long the latest steps of a rank took."""

    time: float = 0.0
    """When the rank reported it, in seconds since the epoch."""
    step: int | float
    step_seconds: int | float
    samples_per_second: int | float | None = None
    wait_seconds: int | float | None = None
    """Seconds of a step in which gradients were on their way and nothing was computed; None: not known."""


class Progress(BaseModel):
    """The latest progress of the training."""

    time: float = 0.0
    step: int | float | None = None
    total_steps: int | float | None = None
    epoch: int | float | None = None
    seconds_left: int | float | None = None


class Rank(BaseModel):
    """A rank, as it reported itself when all ranks met."""

    rank: int
    host: str
    """The machine: on Kubernetes the node."""
    cpus: float | None = None
    threads: float | None = None
    hostname: str | None = None
    """Its own host name: on Kubernetes the pod."""
    devices: int | None = None
    """Devices of XLA that it drives; None on CPUs."""
    exit_code: int | None = None
    """Its exit code; None: unknown."""
    pace: Pace | None = None
    """How long its latest steps took; None: it made none."""
    met: float = 0.0
    """When it introduced itself, in seconds since the epoch by the clock of its host; 0: unknown."""


def _meetings(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Validate meetings that were read from a file, and fill in what earlier versions left out.

    Raises:
        ValueError: A meeting lacks what its readers need.
    """
    for meeting in rounds:
        meeting.update({"hosts": [], "round": 0} | meeting)  # they left out what was empty
        ranks, hosts = meeting.get("ranks"), meeting["hosts"]
        numbers = [meeting.get("world_size"), meeting["round"], meeting.get("began", 0.0)]
        has_lists = isinstance(ranks, list) and isinstance(hosts, list)
        if not (has_lists and all(map(is_finite, [*numbers, *(ranks or ())]))):
            raise ValueError("it is no meeting of ranks")
    return rounds


class Observed(BaseModel):
    """What the ranks of a training reported."""

    world_size: int | None = None
    ranks: list[Rank] = Field(default_factory=list)
    backend: str | None = None
    backend_reason: str | None = None
    rounds: Annotated[list[dict[str, Any]], AfterValidator(_meetings)] = Field(default_factory=list)
    metrics: dict[str, Any] = Field(default_factory=dict)
    series: dict[str, Series] = Field(default_factory=dict)
    """Name of a metric -> its curve."""
    progress: Progress | None = None
    start: str | None = None
    """What the start waits for, as rank 0 reported; None once the program reports something."""
    events: int = 0
    """Count of all events; a display compares it to see whether there is something new."""
    warnings: list[str] = Field(default_factory=list)
    returned: Any = None
    """The return value of rank 0, if the program is the function of a task."""
    has_returned: bool = False
    """Whether it returned: None is a return value too."""
    parts: list[str] = Field(default_factory=list)
    """The parts of the return value that have come so far."""
    result: ResultEvent | None = None
    """What rank 0 returned, or the name of its file, if the program is a notebook's function."""
    failure: RankFailure | None = None
    finished_meeting: str | None = None
    """Name of the meeting that a restarted rank found finished; None: no rank did."""
    introduced: list[str] = Field(default_factory=list)
    """``rank@time`` of every proof from a meeting without a name: a log may be read twice."""
    failed_at: float = 0.0
    """Seconds since the epoch; 0: lines have no times."""

    @property
    def hosts(self) -> list[str]:
        """Distinct hosts, in the order of their first rank."""
        return list(dict.fromkeys(rank.host for rank in self.ranks))

    @property
    def met(self) -> bool:
        """Whether all ranks of a meeting have proved that they are there."""
        return any(map(_is_complete, self.rounds))

    @property
    def met_last(self) -> float:
        """When the last complete meeting began, in seconds since the epoch; 0: unknown."""
        complete = filter(_is_complete, self.rounds)
        return max((float(meeting.get("began", 0)) for meeting in complete), default=0.0)

    @property
    def finished(self) -> bool:
        """Whether all ranks of the last meeting have ended with 0."""
        all_known = bool(self.ranks) and len(self.ranks) == self.world_size
        return all_known and all(rank.exit_code == 0 for rank in self.ranks)

    def forget_failure(self, until: float) -> None:
        """Forget the recorded failure of a rank if it happened at or before ``until``.

        ``until``: seconds since the epoch. By then the ranks met again, or a suspension had ended them.
        """
        if self.failed_at <= until:
            self.failure, self.failed_at = None, 0.0


def _is_complete(meeting: dict[str, Any]) -> bool:
    """Whether as many ranks have joined a meeting as it needs."""
    return len(meeting["ranks"]) == int(meeting["world_size"])
