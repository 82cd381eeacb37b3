"""Send points to trackers while a training runs, each tracker from a thread of its own: no caller waits."""

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
from manycpu.pipeline.tracking.trackers import TRACKERS, open_tracker, points_of, tracked

_LOG = logging.getLogger(__name__)
_BATCH_INTERVAL_S: Final = 3.0
_RETRY_INTERVAL_S: Final = 15.0  # after a batch that failed
_FLUSH_TIMEOUT_S: Final = 10.0  # the first batch imports the tracker's library
_QUEUE_POINTS: Final = 20_000  # that wait at most; the oldest are dropped


def listeners(
    ctx: RunContext,
    handle: Handle,
    warn: Callable[[str], object] = _LOG.warning,
    progress: Progress | None = None,
    say: Callable[[str], object] = _LOG.info,
) -> tuple[RankListener, ...]:
    """Make a listener for each tracker of a run, which sends it what the ranks of an attempt report.

    Args:
        ctx: The run, as the attempt was started.
        handle: The attempt.
        warn: Receives one warning for each tracker that does not answer.
        progress: How far the training is, if the listeners do not follow it from its beginning.
        say: Receives, once for each tracker, where it has the attempt.
    """
    step = None if progress is None else progress.step
    return tuple(
        _TrackerListener(name, ctx, handle, warn=warn, say=say, step=step)
        for name in dict.fromkeys(ctx.run.tracking)  # each once
    )


class _TrackerListener(Silent):
    """Queues the points of an attempt; a thread sends them in batches while there are any."""

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        name: str,
        ctx: RunContext,
        handle: Handle,
        warn: Callable[[str], object],
        say: Callable[[str], object],
        step: float | None,
    ) -> None:
        self._name, self._label = name, TRACKERS[name].label
        self._ctx, self._handle = ctx, handle
        self._warn, self._say = warn, say
        self._step = step  # the last one that the training reported
        self._queue: deque[Point] = deque(maxlen=_QUEUE_POINTS)
        self._change = threading.Condition()  # notified when a flush begins, and when the thread ends
        self._sending = False  # the thread runs
        self._gave_up = False  # the thread ends after a failure; the next point starts another
        self._flushing = False  # the thread must not pause; reset by the next point
        self._warned = False
        self._said_place = False
        self._opened: tuple[Tracker, Tracked] | None = None

    def event(self, event: Event, line: RankLine) -> None:
        """Queue the event's points, and start the thread unless it runs; warn if old points are dropped."""
        if isinstance(event, ProgressEvent):
            self._step = event.step
        points = points_of(event, line.rank, step=self._step, now=time.time())
        if not points:
            return
        with self._change:
            if len(self._queue) + len(points) > _QUEUE_POINTS:
                self._warn_once("it accepts points more slowly than the training reports them")
            self._queue.extend(points)
            self._gave_up = False
            self._flushing = False
            if not self._sending:
                self._sending = True
                threading.Thread(target=self._run, name=f"to {self._label}", daemon=True).start()

    def flush(self) -> None:
        """Make the thread send the queued points now, and wait until it ends; warn after ten seconds."""
        with self._change:
            self._flushing = True
            self._change.notify_all()
            if not self._change.wait_for(lambda: not self._sending, timeout=_FLUSH_TIMEOUT_S):
                self._warn_once(f"it has not answered within {_FLUSH_TIMEOUT_S:.0f} s")

    def _run(self) -> None:
        """Send batches until the queue is empty. End also if the tracker fails and no new points come."""
        while True:
            with self._change:
                batch = [] if self._gave_up else list(self._queue)
                if not batch:
                    self._sending = False
                    self._change.notify_all()
                    return
                self._queue.clear()
            why = self._send(batch)
            with self._change:
                if why is not None:
                    self._warn_once(why)
                    # Put the batch back before the newer points; its oldest are dropped if there is no room.
                    room = _QUEUE_POINTS - len(self._queue)
                    newest = batch[-room:] if room else []  # [-0:] would be all
                    self._queue.extendleft(reversed(newest))
                queued = len(self._queue)
                pause_s = _BATCH_INTERVAL_S if why is None else _RETRY_INTERVAL_S
                # Pause, unless a flush begins: points that come meanwhile make one batch.
                self._change.wait_for(lambda: self._flushing, timeout=pause_s)
                # After a failure, give up if no point came meanwhile, or at a flush. The next point starts
                # another thread, and the end of the run sends all points again.
                self._gave_up = why is not None and (self._flushing or len(self._queue) == queued)

    def _send(self, batch: Sequence[Point]) -> str | None:
        """Send a batch to the tracker; return why that failed, else None.

        The first batch opens the tracker, and says where it has the attempt.
        """
        try:
            if self._opened is None:
                self._opened = open_tracker(self._name, self._ctx), _described(self._ctx, self._handle)
            tracker, attempt = self._opened
            tracker.send(attempt, batch)
            if not self._said_place:
                self._said_place = True
                self._say(place_in_words(self._name, tracker.place_of(attempt)))
        except Exception as error:  # noqa: BLE001 - each tracker has errors of its own, and none stops a training
            return str(error) or type(error).__name__
        return None

    def _warn_once(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            later = "the training continues, and its end sends the missing points"
            self._warn(f"{self._label} is away: {redacted(why)}; {later}")


def _described(ctx: RunContext, handle: Handle) -> Tracked:
    """Describe the attempt of a handle for a tracker, from the run's ledger."""
    return tracked(ctx.ledger.read(), handle.attempt)
