"""How long a worker stays with a training before the triggerer follows it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from manycpu.pipeline.spec.event_types import Event
    from manycpu.pipeline.spec.events import RankLine

__all__ = ["Patience"]

STAY = 15.0  # seconds in the worker before deferring: most that goes wrong goes wrong by then
LONG = 30.0  # seconds that a training must have left for the worker to be given back before that
ASK_EVERY = 1.0  # seconds between two questions whether a person has ended this task


class Patience:
    """Decides how long a worker stays with a training: 15 s, or until it is known to take much longer."""

    def __init__(self) -> None:
        self._until = time.monotonic() + STAY
        self._ask = time.monotonic() + ASK_EVERY

    def asks(self) -> bool:
        """Whether it is time to ask again who wants this task to end."""
        if time.monotonic() < self._ask:
            return False
        self._ask = time.monotonic() + ASK_EVERY
        return True

    @property
    def ends(self) -> bool:
        """Whether it is at an end."""
        return time.monotonic() >= self._until

    def line(self, line: RankLine) -> None: ...
    def flush(self) -> None: ...

    def event(self, event: Event, line: RankLine) -> None:  # noqa: ARG002 - as every listener has it
        """End it at once where the training says that it has long to go."""
        from manycpu.pipeline.spec.event_types import ProgressEvent

        if isinstance(event, ProgressEvent) and (event.seconds_left or 0) > LONG:
            self._until = time.monotonic()
