"""Notes of a follower's own on its job, which are shown among the lines of the ranks."""

from collections.abc import Callable
from typing import Final

from manycpu.pipeline.spec.events import RankLine

__all__ = ["Notes"]

_PATIENCE: Final = 5.0  # seconds that a job may wait before it is reported why
_EVERY: Final = 10.0  # seconds between two notes on why a job waits
_SOON: Final = 2.0  # seconds after which it is told that a job was preempted, and why
_AWAY_EVERY: Final = 60.0  # seconds between two notes that the cluster is away


class Notes:
    """Notes that wait to be told.

    Args:
        now: Tells the time; seconds since the epoch.
        wake: Is called when there is one.
    """

    def __init__(self, now: Callable[[], float], wake: Callable[[], None]) -> None:
        self._now, self._wake = now, wake
        self._texts: list[str] = []
        self._reason, self._reason_due = "", now() + _PATIENCE
        self._away_due = 0.0

    def say(self, text: str) -> None:
        """Note something."""
        self._texts.append(text)
        self._wake()

    def away(self, text: str) -> None:
        """Note that the cluster is away, now and then."""
        if self._now() >= self._away_due:
            self._away_due = self._now() + _AWAY_EVERY
            self.say(text)

    def waiting(self, reason: str) -> None:
        """Note why the job waits and what befell its pods: when that is new, and not all the time."""
        if reason == self._reason or self._now() < self._reason_due:
            return
        told = self._reason.splitlines()
        self._reason, self._reason_due = reason, self._now() + _EVERY
        for line in reason.splitlines():
            if line not in told:
                self.say(line)

    def soon(self) -> None:
        """Let the next reason be noted soon, however short ago the last one was."""
        self._reason_due = min(self._reason_due, self._now() + _SOON)

    def due(self, reason: str) -> list[float]:
        """When this reason is to be noted, where it is new; seconds since the epoch."""
        return [self._reason_due] if reason != self._reason else []

    def take(self) -> list[RankLine]:
        """Return the notes that were not told yet."""
        texts, self._texts = self._texts, []
        return [RankLine(None, None, text) for text in texts]
