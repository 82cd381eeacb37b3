"""Messages of a follower about its job, which are delivered among the lines of the ranks."""

from collections.abc import Callable
from typing import Final

from manycpu.pipeline.spec.events import RankLine

__all__ = ["Notes"]

_PATIENCE: Final = 5.0  # seconds before the first note on why a job waits
_EVERY: Final = 10.0  # minimum seconds between two notes on why a job waits
_SOON: Final = 2.0  # maximum seconds before a note that a job was preempted, and why
_AWAY_EVERY: Final = 60.0  # minimum seconds between two notes that the cluster cannot be reached


class Notes:
    """Notes that wait for delivery.

    Args:
        now: Returns the time, in seconds since the epoch.
        wake: Called when there is a new note.
    """

    def __init__(self, now: Callable[[], float], wake: Callable[[], None]) -> None:
        self._now, self._wake = now, wake
        self._texts: list[str] = []
        self._reason, self._reason_due = "", now() + _PATIENCE
        self._away_due = 0.0

    def say(self, text: str) -> None:
        """Add a note."""
        self._texts.append(text)
        self._wake()

    def away(self, text: str) -> None:
        """Add a note that the cluster cannot be reached, at most once a minute."""
        if self._now() >= self._away_due:
            self._away_due = self._now() + _AWAY_EVERY
            self.say(text)

    def waiting(self, reason: str) -> None:
        """Add a note for each new line of the job's reason, such as a lost pod, but not too often."""
        if reason == self._reason or self._now() < self._reason_due:
            return
        told = self._reason.splitlines()
        self._reason, self._reason_due = reason, self._now() + _EVERY
        for line in reason.splitlines():
            if line not in told:
                self.say(line)

    def soon(self) -> None:
        """Make the next note on a reason due within two seconds, even if the last one is recent."""
        self._reason_due = min(self._reason_due, self._now() + _SOON)

    def due(self, reason: str) -> list[float]:
        """Return when the note on this reason is due, in seconds since the epoch; empty: it is not new."""
        return [self._reason_due] if reason != self._reason else []

    def take(self) -> list[RankLine]:
        """Return the notes that were not delivered yet, and remove them."""
        texts, self._texts = self._texts, []
        return [RankLine(None, None, text) for text in texts]
