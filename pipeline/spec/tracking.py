"""What trackers are told of a training: whose it is, its points, and how it ended."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

__all__ = ["Ending", "Place", "Point", "Tracked", "Tracker", "TrackerName", "model_name", "place_in_words"]

TrackerName = Literal["tensorboard", "mlflow"]
Place = Mapping[str, str]
"""Where people find an attempt, without credentials: what it is -> its value, such as ``link``."""


class Point(NamedTuple):
    """One value of a metric."""

    name: str
    """Anything that a script calls it."""
    step: int
    """0 where it belongs to no step."""
    time: float
    """Seconds since the epoch, by the rank's clock."""
    value: float


@dataclass(frozen=True)
class Tracked:
    """An attempt of a run: what a tracker finds it again by, and what it was started with."""

    key: str
    name: str
    """Name of the run."""
    began: float
    """When the run began, in seconds since the epoch: one that is cleared and done anew has the same key."""
    attempt: int
    started: float
    """When the attempt was started, in seconds since the epoch."""
    group: str
    """What it stands beside others of: its DAG, or its program."""
    params: Mapping[str, str]
    tags: Mapping[str, str]


@dataclass(frozen=True)
class Ending:
    """How an attempt ended."""

    state: Literal["succeeded", "failed", "cancelled"]
    time: float
    """When, in seconds since the epoch."""
    final: bool = True
    """Whether the whole run has ended: it may still be exported, or tried again."""
    points: Sequence[Point] = ()
    """Every point that was kept: those that were sent before count once."""
    tags: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None
    """Name under which the exported model is to be registered; None: it is not."""
    path: str | None = None
    """Folder or URL of the exported model."""


class Tracker(Protocol):
    """Whoever keeps trainings to be compared. Errors are whatever its library raises."""

    def send(self, tracked: Tracked, points: Sequence[Point]) -> None:
        """Take points of an attempt; those that it has already count once."""

    def end(self, tracked: Tracked, ending: Ending) -> None:
        """Take what was missed, and how the attempt ended; told twice, it is as told once."""

    def place_of(self, tracked: Tracked) -> Place:
        """Say where people find an attempt, as far as is known without asking anybody."""


def place_in_words(name: str, place: Place) -> str:
    """Say where a tracker has an attempt.

    >>> place_in_words("mlflow", {"address": "http://mlflow:5000", "experiment": "weekly"})
    'mlflow: address http://mlflow:5000, experiment weekly'
    """
    return f"{name}: {', '.join(f'{what} {value}' for what, value in place.items())}"


def model_name(name: str, trackers: Sequence[str], output: str | None) -> str:
    """Check the name of a model to register.

    Raises:
        ValueError: There is nobody to register it, or nothing to register, or the name is none.
    """
    if "mlflow" not in trackers:
        raise ValueError("MLflow registers models: put mlflow into run.tracking")
    if output is None:
        raise ValueError("there is no model to register where run.output is null")
    if set(name) & {"/", ":", "'"}:
        raise ValueError("the name of a registered model has no slash, no colon and no quote")
    return name
