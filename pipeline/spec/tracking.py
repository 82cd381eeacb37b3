"""What trackers receive of a training: its identity, its points, and how it ended."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

TrackerName = Literal["tensorboard", "mlflow"]
Place = Mapping[str, str]
"""Where people find an attempt, without credentials: kind of address, such as ``link`` -> its value."""


class Point(NamedTuple):
    """One value of a metric."""

    name: str
    """Any name that a script gives it."""
    step: int
    """0: it belongs to no step."""
    time: float
    """Seconds since the epoch, by the rank's clock."""
    value: float


@dataclass(frozen=True)
class Tracked:
    """An attempt of a run: how a tracker identifies it, and what it was started with."""

    key: str
    name: str
    """Name of the run."""
    began: float
    """When the run began, in seconds since the epoch: a run that is cleared and repeated has the same key."""
    attempt: int
    started: float
    """When the attempt was started, in seconds since the epoch."""
    group: str
    """Its group of comparable attempts: its DAG, or its program."""
    params: Mapping[str, str]
    tags: Mapping[str, str]


@dataclass(frozen=True)
class Ending:
    """How an attempt ended."""

    state: Literal["succeeded", "failed", "cancelled"]
    time: float
    """When, in seconds since the epoch."""
    final: bool = True
    """Whether the whole run has ended; else it may still be exported, or tried again."""
    points: Sequence[Point] = ()
    """Every point that was kept, also those that were sent before."""
    tags: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None
    """Name under which the exported model is to be registered; None: it is not."""
    path: str | None = None
    """Folder or URL of the exported model."""


class Tracker(Protocol):
    """A service that records trainings. Its methods may raise any error of the service's library."""

    def send(self, tracked: Tracked, points: Sequence[Point]) -> None:
        """Record points of an attempt; points that it has already are not repeated."""

    def end(self, tracked: Tracked, ending: Ending) -> None:
        """Record the points that were missed, and how the attempt ended; idempotent."""

    def place_of(self, tracked: Tracked) -> Place:
        """Return where people find an attempt, as far as is known without a request."""


def place_in_words(name: str, place: Place) -> str:
    """Write in one line where the tracker ``name`` shows an attempt.

    >>> place_in_words("mlflow", {"address": "http://mlflow:5000", "experiment": "weekly"})
    'mlflow: address http://mlflow:5000, experiment weekly'
    """
    return f"{name}: {', '.join(f'{what} {value}' for what, value in place.items())}"
