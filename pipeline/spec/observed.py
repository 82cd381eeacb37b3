"""What the ranks of a training have reported, as far as it is kept: their state, and curves of their metrics.

>>> loss = Series()
>>> for step in range(100_000):
...     loss.add(step, 1.0 + step, 1 / (1 + step) if step != 70_000 else 9.0)
>>> len(loss.values) <= SERIES_LIMIT, loss.values[0], max(loss.values), loss.steps[-1]
(True, 1.0, 9.0, 99999)
"""

import math
from collections.abc import Mapping
from itertools import groupby
from typing import Any, Final, TypeGuard

from pydantic import BaseModel, Field, model_validator

from manycpu.pipeline.spec.event_types import Event, MetricsEvent, PaceEvent, ProgressEvent
from manycpu.pipeline.spec.state import RankFailure

__all__ = [
    "FIRST_METRICS",
    "SERIES_LIMIT",
    "Observed",
    "Pace",
    "Progress",
    "Rank",
    "Series",
    "is_finite",
    "values_of",
]

SERIES_LIMIT: Final = 300
"""Points that a curve keeps."""
FIRST_METRICS: Final = ("loss", "learning_rate", "samples_per_second")
"""Metrics that people look at first."""
_OF_PROGRESS: Final = ("loss", "grad_norm", "learning_rate", "samples_per_second")


class Series(BaseModel):
    """Columns of equal length. Where there are too many points, spans of equal counts keep their extremes."""

    index: list[int] = Field(default_factory=list)
    """Which of all values each is, from 0 on."""
    steps: list[int | float | None] = Field(default_factory=list)
    times: list[float] = Field(default_factory=list)
    """Seconds since the epoch, by the clock of the rank; 0 where nobody told."""
    values: list[int | float] = Field(default_factory=list)
    _retold: bool = False

    @model_validator(mode="after")
    def _is_even(self) -> "Series":
        if len({len(self.index), len(self.steps), len(self.times), len(self.values)}) > 1:
            raise ValueError("the columns of a curve have different lengths")
        return self

    def add(self, step: float | None, time: float, value: Any) -> None:
        """Add a value, unless it is no finite number, or was heard before: a log may be read again.

        Args:
            step: The step that it belongs to; None where nobody told.
            time: When it was written, in seconds since the epoch; 0 where nobody told.
            value: The value.
        """
        if not is_finite(value) or self._was_heard(step, time, value):
            return
        self.index.append(self.index[-1] + 1 if self.index else 0)
        self.steps.append(step)
        self.times.append(time or (self.times[-1] if self.times else 0.0))
        self.values.append(value)
        if len(self.values) > SERIES_LIMIT:
            fewer = self.thinned(SERIES_LIMIT // 2)
            for name, column in fewer:
                setattr(self, name, column)

    def thinned(self, points: int) -> "Series":
        """Return at most so many points of it, at least four: the first, the last, and extremes between."""
        if len(self.values) <= points:
            return self
        spans = max(1, (points - 2) // 2)
        first, width = self.index[0], (self.index[-1] - self.index[0] + 1) / spans
        chosen = {0, len(self.values) - 1}
        for _, span in groupby(range(len(self.values)), key=lambda at: int((self.index[at] - first) / width)):
            places = list(span)
            chosen |= {min(places, key=self.values.__getitem__), max(places, key=self.values.__getitem__)}
        kept = sorted(chosen)
        columns = self.model_dump()
        return Series(**{name: [column[at] for at in kept] for name, column in columns.items()})

    def _was_heard(self, step: float | None, time: float, value: float) -> bool:
        """Whether a log is read again: a clock may go back as well, and what it tells then is new."""
        if not time or not self.times or time > self.times[-1]:
            self._retold = False
            return False
        known = (step, time, value) in zip(self.steps, self.times, self.values, strict=True)
        heard = known or self._retold
        self._retold = heard and time < self.times[-1]
        return heard


def values_of(event: Event, rank: int | None, step: float | None) -> tuple[float | None, Mapping[str, Any]]:
    """Read which values of curves an event tells, and the step that they belong to.

    Args:
        event: What a rank has reported.
        rank: The rank.
        step: The step that the training has come to: that of a pace.
    """
    match event:
        case ProgressEvent():
            return event.step, {name: getattr(event, name) for name in _OF_PROGRESS}
        case MetricsEvent():
            return event.step, event.values
        case PaceEvent() if rank == 0:
            return event.step if step is None else step, {"step_seconds": event.step_seconds}
    return None, {}


def is_finite(value: object) -> TypeGuard[float]:
    """Whether it is a number that a curve can have."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float is as large as
        return False


class Pace(BaseModel):
    """How fast the steps of a rank went of late."""

    time: float = 0.0
    """When it told so, in seconds since the epoch."""
    step: int | float
    step_seconds: int | float
    samples_per_second: int | float | None = None
    wait_seconds: int | float | None = None
    """Seconds of a step in which gradients were on their way and nothing was computed; None: not known."""


class Progress(BaseModel):
    """How far the training was of late."""

    time: float = 0.0
    step: int | float | None = None
    total_steps: int | float | None = None
    epoch: int | float | None = None
    seconds_left: int | float | None = None


class Rank(BaseModel):
    """A rank as it introduced itself."""

    rank: int
    host: str
    """The machine: on Kubernetes the node."""
    cpus: float | None = None
    threads: float | None = None
    hostname: str | None = None
    """What it calls itself: on Kubernetes the pod."""
    devices: int | None = None
    """Devices of XLA that it drives; None on CPUs."""
    exit_code: int | None = None
    """How it ended; None where nobody told."""
    pace: Pace | None = None
    """How fast its steps went of late; None where it made none."""


class Observed(BaseModel):
    """What the ranks of a training reported."""

    world_size: int | None = None
    ranks: list[Rank] = Field(default_factory=list)
    backend: str | None = None
    backend_reason: str | None = None
    rounds: list[dict[str, Any]] = Field(default_factory=list)
    metrics: dict[str, Any] = Field(default_factory=dict)
    series: dict[str, Series] = Field(default_factory=dict)
    """Name of a metric -> its curve."""
    progress: Progress | None = None
    start: str | None = None
    """What the start waits for, as rank 0 said; None once the program tells something."""
    events: int = 0
    """How many were heard: whoever shows them sees by it that there is something new."""
    warnings: list[str] = Field(default_factory=list)
    returned: Any = None
    """What rank 0 returned, where the program is the function of a task."""
    has_returned: bool = False
    """Whether it did: None is something to return."""
    parts: list[str] = Field(default_factory=list)
    """What has come of that so far."""
    failure: RankFailure | None = None
    finished_meeting: str | None = None
    """Name of the meeting that a rank found finished when it came back; None where none did."""
    introduced: list[str] = Field(default_factory=list)
    """``rank@time`` of every introduction at a meeting without a name: a log may be read again."""
    failed_at: float = 0.0
    """Seconds since the epoch; 0 where lines have no times."""

    @property
    def hosts(self) -> list[str]:
        """Distinct hosts, in the order of their first rank."""
        return list(dict.fromkeys(rank.host for rank in self.ranks))

    @property
    def met(self) -> bool:
        """Whether all ranks of a meeting have introduced themselves."""
        return any(map(_is_complete, self.rounds))

    @property
    def met_last(self) -> float:
        """When the last meeting began to which all came; seconds since the epoch, 0 where nobody knows."""
        complete = filter(_is_complete, self.rounds)
        return max((float(meeting.get("began", 0)) for meeting in complete), default=0.0)

    @property
    def finished(self) -> bool:
        """Whether all ranks of the last meeting have reported a good end."""
        everyone = bool(self.ranks) and len(self.ranks) == self.world_size
        return everyone and all(rank.exit_code == 0 for rank in self.ranks)

    def forget_failure(self, before: float) -> None:
        """Forget how ranks ended whose nodes were taken back."""
        if self.failed_at <= before:
            self.failure, self.failed_at = None, 0.0


def _is_complete(meeting: dict[str, Any]) -> bool:
    return len(meeting["ranks"]) == int(meeting["world_size"])
