"""How far a container's log was read, exactly, so that reading goes on after any break. Pure.

The API gives lines from a whole second on. What was told already of those is the beginning of what it
gives, in the log's own order: it is skipped by count, which no equal times and no times out of order can
upset. Where the kubelet has begun a new file meanwhile, the beginning is another line; then times decide.
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
_KEPT = 1  # whole seconds before the last line's that are read again


class Stamped(NamedTuple):
    """A line of a container's log."""

    time: int
    """Nanoseconds since the epoch, by the node's clock."""
    text: str


def parse(line: bytes) -> Stamped | None:
    """Parse a log line with its time; None for any other, such as a message of the kubelet."""
    stamp, _, text = line.partition(b" ")
    try:
        return Stamped(_nanoseconds(stamp.decode("ascii")), text.decode(errors="replace").rstrip("\r"))
    except ValueError:
        return None


def placed(line: RankLine, container: str) -> RankLine:
    """Name the container of what no rank said; an event stays one, to be read as such."""
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
    """How far a log was read.

    Args:
        state: What ``state`` of another position was, to go on from there.
        before: The state of the position in the log that this one's replaced. Whoever asks for a container's
            log just as it is started again may have been given this one for that.
    """

    def __init__(self, state: Iterable[Any] = (), before: Iterable[Any] = ()) -> None:
        self._before = (*before,)
        self._restore(state)

    def _restore(self, state: Iterable[Any]) -> None:
        seconds, self._last, self._equal, self._first = (*state,) or _NOTHING
        self._seconds = [_Second(*second) for second in seconds]
        self._skip = 0
        self._by_count: bool | None = None
        """How to tell what is known; None before the first line shows it."""

    @property
    def state(self) -> list[Any]:
        """The position as JSON, from which another cursor goes on."""
        return [[list(second) for second in self._seconds], self._last, self._equal, self._first]

    @property
    def since(self) -> int | None:
        """The second since the epoch from which to read on; None: from the beginning."""
        return min((second.second for second in self._seconds), default=None)

    def reopen(self) -> None:
        """Prepare for the lines from ``since`` on."""
        self._skip, self._by_count = sum(second.lines for second in self._seconds), None

    def doubts(self, time: int) -> bool:
        """Whether the first line since ``reopen`` differs from what it was: is this another log?"""
        return self._by_count is None and bool(self._seconds) and time != self._seconds[0].first

    def take(self, time: int) -> bool:
        """Advance by a line; whether it is a new one."""
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
        if not self._by_count:  # another file: its lines are counted from its beginning
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
    """Rate-limit lines, and events of progress alike; report how many were dropped.

    Args:
        per_second: How many.
    """

    def __init__(self, per_second: int) -> None:
        self._per_second = per_second
        self._second, self._dropped = 0, 0
        self._admitted: Counter[type[Event] | None] = Counter()
        """None: ordinary lines."""

    def admit(self, lines: Iterable[RankLine], now: float) -> list[RankLine]:
        """Choose the lines to pass on: a rank's events other than progress always."""
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
        """Report what was dropped and not reported yet: in one line, or none."""
        dropped, self._dropped = self._dropped, 0
        if not dropped:
            return []
        text = f"{dropped} lines were dropped here: at most {self._per_second} a second are shown"
        return [RankLine(None, None, text)]
