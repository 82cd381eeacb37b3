"""What the ranks of a training have reported, as far as it is kept."""

from typing import Any

from pydantic import BaseModel, Field

from manycpu.pipeline.spec.series import Series
from manycpu.pipeline.spec.state import RankFailure

__all__ = ["Observed", "Pace", "Progress", "Rank"]


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
