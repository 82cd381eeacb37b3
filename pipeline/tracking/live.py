"""Tell trackers of a training while it goes on, from threads of their own: nobody waits for them."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from manycpu.pipeline.listeners import RankListener, Silent
from manycpu.pipeline.spec.credentials import redacted
from manycpu.pipeline.spec.event_types import Event, ProgressEvent
from manycpu.pipeline.spec.events import RankLine
from manycpu.pipeline.spec.handle import Handle
from manycpu.pipeline.spec.observed import Progress
from manycpu.pipeline.spec.tracking import Point, Tracked, Tracker, place_in_words
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.tracking.told import points_of, tracked
from manycpu.pipeline.tracking.trackers import TRACKERS, open_tracker

__all__ = ["listeners"]

_LOG = logging.getLogger(__name__)
_EVERY: Final = 3.0  # seconds between two batches
_AGAIN: Final = 15.0  # seconds until one who was away is tried again
_LAST: Final = 10.0  # seconds that whoever goes on waits for the last batch: the first loads a library
_ROOM: Final = 20_000  # points that wait


def listeners(
    ctx: RunContext,
    handle: Handle,
    warn: Callable[[str], object] = _LOG.warning,
    progress: Progress | None = None,
    say: Callable[[str], object] = _LOG.info,
) -> tuple[RankListener, ...]:
    """Make those who pass on what the ranks of an attempt report to the trackers of its run.

    Args:
        ctx: The run, as the attempt was started.
        handle: The attempt.
        warn: Is told, once for each tracker, that it is away.
        progress: How far the training is, for those who do not hear it from its beginning.
        say: Is told, once for each tracker, where it has the attempt.
    """
    step = None if progress is None else progress.step
    return tuple(
        _Told(TRACKERS[name].label, _Sending(name, ctx, handle, say), warn, step)
        for name in dict.fromkeys(ctx.run.tracking)
    )


class _Told(Silent):
    """Gathers the points of an attempt, and has a thread send them for as long as there are any."""

    def __init__(
        self, label: str, sending: "_Sending", warn: Callable[[str], object], step: float | None
    ) -> None:
        self._label, self._sending, self._warn, self._step = label, sending, warn, step
        self._waiting: deque[Point] = deque(maxlen=_ROOM)
        self._change = threading.Condition()
        self._busy = self._gives_up = self._hurried = self._warned = False

    def event(self, event: Event, line: RankLine) -> None:
        """Gather its points."""
        if isinstance(event, ProgressEvent):
            self._step = event.step
        points = points_of(event, line.rank, self._step, time.time())
        if not points:
            return
        with self._change:
            if len(self._waiting) + len(points) > _ROOM:
                self._say("it takes fewer points than there are")
            self._waiting.extend(points)
            self._gives_up = self._hurried = False
            if not self._busy:
                self._busy = True
                threading.Thread(target=self._send, name=f"to {self._label}", daemon=True).start()

    def flush(self) -> None:
        """Have the last batch sent now; one who is away is not waited for."""
        with self._change:
            self._hurried = True
            self._change.notify_all()
            if not self._change.wait_for(lambda: not self._busy, _LAST):
                self._say(f"it has not answered within {_LAST:.0f} s")

    def _send(self) -> None:
        """Send batches until no more points come, or none to one who is away."""
        while batch := self._take():
            why = self._sending(batch)
            with self._change:
                if why is not None:
                    self._say(why)
                    self._put_back(batch)
                waiting = len(self._waiting)
                self._change.wait_for(lambda: self._hurried, _EVERY if why is None else _AGAIN)
                # The next point tries again; and the end tells it all.
                self._gives_up = why is not None and (self._hurried or len(self._waiting) == waiting)

    def _take(self) -> list[Point]:
        """Take what waits; where that is nothing, the thread ends."""
        with self._change:
            batch = [] if self._gives_up else list(self._waiting)
            if batch:
                self._waiting.clear()
            else:
                self._busy = False
                self._change.notify_all()
            return batch

    def _put_back(self, batch: list[Point]) -> None:
        room = _ROOM - len(self._waiting)
        self._waiting.extendleft(reversed(batch[-room:] if room else []))

    def _say(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            told_later = "the training goes on, and what is missed is told at its end"
            self._warn(f"{self._label} is away: {redacted(why)}; {told_later}")


class _Sending:
    """Sends batches; opens its tracker, and looks up what the attempt is, when there is something to send."""

    def __init__(self, name: str, ctx: RunContext, handle: Handle, say: Callable[[str], object]) -> None:
        self._name, self._ctx, self._handle, self._say = name, ctx, handle, say
        self._opened: tuple[Tracker, Tracked] | None = None
        self._said = False

    def __call__(self, batch: Sequence[Point]) -> str | None:
        """Send a batch; says why where that fails."""
        try:
            self._opened = self._opened or self._open()
            tracker, attempt = self._opened
            tracker.send(attempt, batch)
            if not self._said:
                self._said = True
                self._say(place_in_words(self._name, tracker.place_of(attempt)))
        except Exception as error:  # noqa: BLE001 - each tracker has errors of its own, and none stops a training
            return str(error) or type(error).__name__
        return None

    def _open(self) -> tuple[Tracker, Tracked]:
        return open_tracker(self._name, self._ctx), _described(self._ctx, self._handle)


def _described(ctx: RunContext, handle: Handle) -> Tracked:
    return tracked(ctx.ledger.read(), handle.attempt)
