"""Track exactly how far a container's log was read, so that reading resumes after any break. Pure.

The API returns the lines from a whole second on, in the order of the log. The first of these were delivered
before, so they are skipped by count: this works with equal times, and with times out of order. If the kubelet
has started a new log file since, the first line differs; then lines are skipped by their times.
"""

import re
from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

from manycpu.pipeline.spec.event_types import Event, ProgressEvent, decode
from manycpu.pipeline.spec.events import RankLine

__all__ = ["LogCursor", "RateLimiter", "Stamped", "parse", "placed"]

_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)")
_NANO = 1_000_000_000
_NOTHING = ((), 0, 0, 0)
_KEPT = 1  # whole seconds before that of the last line, whose lines are read again


class Stamped(NamedTuple):
    """A line of a container's log, with its time."""

    time: int
    """Nanoseconds since the epoch, by the node's clock."""
    text: str


def parse(line: bytes) -> Stamped | None:
    """Parse a log line with its time; None: it has no time, such as a message of the kubelet."""
    stamp, _, text = line.partition(b" ")
    try:
        return Stamped(_nanoseconds(stamp.decode("ascii")), text.decode(errors="replace").rstrip("\r"))
    except ValueError:
        return None


def placed(line: RankLine, container: str) -> RankLine:
    """Prefix a line with its container if no rank wrote it; an event stays unchanged, to be decoded later."""
    if line.rank is not None or decode(line.text) is not None:
        return line
    return RankLine(None, None, f"[{container}] {line.text}")


def _nanoseconds(stamp: str) -> int:
    match = _STAMP.fullmatch(stamp)
    if match is None:
        raise ValueError(f"{stamp!r} is no time")
    return _seconds(match[1] + match[3]) * _NANO + int(f"{match[2] or '':0<9}")


@lru_cache(64)
def _seconds(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp())


class _Second(NamedTuple):
    second: int
    lines: int
    first: int
    """Time of its first line in the log."""


class LogCursor:
    """The position up to which a container's log was read.

    Args:
        state: The ``state`` of another cursor of this log, to resume from; empty: start at the beginning.
        before: The ``state`` of the cursor of the container's previous start. A request for that log at the
            moment of the restart may have returned this log instead.
    """

    def __init__(self, state: Iterable[Any] = (), before: Iterable[Any] = ()) -> None:
        self._before = (*before,)
        self._restore(state)

    def _restore(self, state: Iterable[Any]) -> None:
        seconds, self._last, self._equal, self._first = (*state,) or _NOTHING
        self._seconds = [_Second(*second) for second in seconds]
        self._skip = 0
        self._by_count: bool | None = None
        """Whether to skip delivered lines by count, or else by time; None: the first line will decide."""

    @property
    def state(self) -> list[Any]:
        """The position as JSON values, from which another cursor can resume."""
        return [[list(second) for second in self._seconds], self._last, self._equal, self._first]

    @property
    def since(self) -> int | None:
        """The second since the epoch from which to resume; None: read from the beginning."""
        return min((second.second for second in self._seconds), default=None)

    def reopen(self) -> None:
        """Prepare to read the lines from ``since`` on."""
        self._skip, self._by_count = sum(second.lines for second in self._seconds), None

    def doubts(self, time: int) -> bool:
        """Whether the first line since ``reopen`` differs from before, so that this may be another log."""
        return self._by_count is None and bool(self._seconds) and time != self._seconds[0].first

    def take(self, time: int) -> bool:
        """Advance by one line; return whether the line is new."""
        if self._by_count is None:
            self._begin(time)
        if not self._by_count:
            return self._take_by_time(time)
        if self._skip:
            self._skip -= 1
            return False
        self._count(time)
        self._note(time)
        return True

    def _begin(self, time: int) -> None:
        mistaken = not self._seconds and self._before and self._before[-1] == time
        if mistaken:
            self._restore(self._before)
        self._by_count = not mistaken and not self.doubts(time)
        if not self._by_count:  # another file: count its lines from the beginning
            self._skip, self._seconds = self._equal, []

    def _take_by_time(self, time: int) -> bool:
        self._count(time)
        if time < self._last:
            return False
        if time == self._last and self._skip:
            self._skip -= 1
            return False
        if time > self._last:
            self._by_count, self._skip = True, 0
        self._note(time)
        return True

    def _note(self, time: int) -> None:
        self._first = self._first or time
        if time > self._last:
            self._last, self._equal = time, 1
        elif time == self._last:
            self._equal += 1

    def _count(self, time: int) -> None:
        second = time // _NANO
        newest = max((entry.second for entry in self._seconds), default=second)
        for index, entry in enumerate(self._seconds):
            if entry.second == second:
                self._seconds[index] = entry._replace(lines=entry.lines + 1)
                return
        if second < newest - _KEPT:
            return  # too old to be read again
        recent = [entry for entry in self._seconds if entry.second >= second - _KEPT]
        self._seconds = [*recent, _Second(second, 1, time)]


class RateLimiter:
    """Limits the rate of lines, and that of progress events; reports how many were dropped.

    Args:
        per_second: Maximum number of lines, and of progress events, in each second.
    """

    def __init__(self, per_second: int) -> None:
        self._per_second = per_second
        self._second, self._dropped = 0, 0
        self._admitted: Counter[type[Event] | None] = Counter()
        """Type of event -> how many there were in this second; None: ordinary lines."""

    def admit(self, lines: Iterable[RankLine], now: float) -> list[RankLine]:
        """Select the lines to deliver; events other than progress are always delivered."""
        notices = self._turn(int(now))
        admitted = [line for line in lines if self._admits(line)]
        return notices + admitted

    def _admits(self, line: RankLine) -> bool:
        event = decode(line.text)
        kind = None if event is None else type(event)
        self._admitted[kind] += 1
        if kind not in (None, ProgressEvent) or self._admitted[kind] <= self._per_second:
            return True
        self._dropped += 1
        return False

    def _turn(self, second: int) -> list[RankLine]:
        if second == self._second:
            return []
        self._second = second
        self._admitted.clear()
        return self.dropped()

    def dropped(self) -> list[RankLine]:
        """Return a line that says how many lines were dropped since the last report; empty: none were."""
        dropped, self._dropped = self._dropped, 0
        if not dropped:
            return []
        text = f"{dropped} lines were dropped here: at most {self._per_second} a second are shown"
        return [RankLine(None, None, text)]
