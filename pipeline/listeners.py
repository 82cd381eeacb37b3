"""Listeners: receive every line and event that the ranks of an attempt write, on every target.

:func:`manycpu.pipeline.verbs.wait.wait`, and TrainOperator with its triggers (``operators/following.py``),
deliver to listeners. A listener receives each line and each event once, in the order in which a rank wrote
them, also when a trigger resumes after a worker. A process that attaches to an attempt gets all of its lines.
On Kubernetes at most 1,000 ordinary lines and 1,000 events of progress a second are delivered.
"""

import logging
import time
from collections.abc import Callable, Iterable
from functools import partialmethod
from typing import Any, Final, Protocol

from manycpu.pipeline.run_report import Report
from manycpu.pipeline.spec.errors import Finding
from manycpu.pipeline.spec.event_types import (
    ErrorEvent,
    Event,
    ExitEvent,
    OwnEvent,
    PaceEvent,
    ProgressEvent,
    decode,
    readable,
)
from manycpu.pipeline.spec.events import RankLine

_LOG = logging.getLogger(__name__)

_PROGRESS_INTERVAL_S: Final = 10.0


class RankListener(Protocol):
    """Receives what the ranks of an attempt write.

    An exception of a listener ends :func:`manycpu.pipeline.verbs.wait.wait`, but not the training. A run of
    all verbs therefore wraps its listeners in :class:`Guarded`.
    """

    def line(self, line: RankLine) -> None:
        """Receive an ordinary line of a rank, or of the launcher if its rank is None."""

    def event(self, event: Event, line: RankLine) -> None:
        """Receive an event of a rank, and the line that contains it."""

    def flush(self) -> None:
        """Write what is held back: this process stops following, and another one may resume."""


class RunListener(RankListener, Protocol):
    """Receives the steps of a run, and what its ranks write."""

    def begin(self, verb: str) -> None:
        """Receive the name of a verb that begins."""

    def end(self, verb: str, seconds: float, result: str) -> None:
        """Receive the duration and the result of a verb that ended."""

    def progress(self, done: int, total: int) -> None:
        """Receive how many bytes of a transfer are done."""

    def finding(self, finding: Finding) -> None:
        """Receive a warning: of preflight, or that the attempt was started with other fields."""

    def report(self, written: Report, path: str) -> None:
        """Receive the report of the run, and the path or URL of report.json."""


class Silent:
    """A listener that does nothing: a base class, of which a listener overrides what it needs."""

    def line(self, line: RankLine) -> None: ...
    def event(self, event: Event, line: RankLine) -> None: ...
    def flush(self) -> None: ...
    def begin(self, verb: str) -> None: ...
    def end(self, verb: str, seconds: float, result: str) -> None: ...
    def progress(self, done: int, total: int) -> None: ...
    def finding(self, finding: Finding) -> None: ...
    def report(self, written: Report, path: str) -> None: ...


class Guarded:
    """Passes everything to a listener. If the listener raises an ``Exception``, it is dropped.

    The run then continues without it. KeyboardInterrupt, which is no ``Exception``, is raised.
    """

    def __init__(self, listener: RankListener) -> None:
        self._listener: RankListener = listener

    def _call(self, name: str, *args: Any) -> None:
        """Call a method of the listener; after an error, replace the listener by one that does nothing."""
        try:
            getattr(self._listener, name)(*args)
        except Exception as error:  # noqa: BLE001 - an error of a listener is no failure of the training
            failed, self._listener = self._listener, Silent()
            message = "%s failed, and is called no more; the run continues: %s"
            _LOG.warning(message, type(failed).__name__, error, exc_info=True)

    line, event = partialmethod(_call, "line"), partialmethod(_call, "event")
    flush, report = partialmethod(_call, "flush"), partialmethod(_call, "report")
    begin, end = partialmethod(_call, "begin"), partialmethod(_call, "end")
    progress, finding = partialmethod(_call, "progress"), partialmethod(_call, "finding")


class Paced:
    """Passes events on; of the events of progress only the first, one in ten seconds, and the last.

    The time of an event is when its rank wrote it: so a log that is read later shows the same lines.

    Args:
        show: Receives the events that are passed on.
    """

    def __init__(self, show: Callable[[Event, RankLine], object]) -> None:
        self._show = show
        self._shown_at: float | None = None  # when progress was last passed on, by the rank's clock
        self._held: tuple[ProgressEvent, RankLine] | None = None  # the last progress, if not passed on yet

    def event(self, event: Event, line: RankLine) -> None:
        """Pass an event on, or hold it back if it is progress that comes too soon.

        Progress that is held back is passed on before the next event that its rank wrote at least ten seconds
        after the progress shown last. It is also passed on before an error or the end of any rank.
        """
        if isinstance(event, ProgressEvent):
            self._held = (event, line)
        elif isinstance(event, (ErrorEvent, ExitEvent)):  # after which ranks may restart
            self.flush()
        # Progress is held at first, then passed on here: at once, or with a later event.
        if self._held is not None:
            progress, progress_line = self._held
            is_last = progress.step is not None and progress.step == progress.total_steps
            is_too_soon = False
            if self._shown_at is not None:
                # A negative time: the clock was set back, or is that of another host after a restart.
                is_too_soon = 0 <= _time_of(event) - self._shown_at < _PROGRESS_INTERVAL_S
            # Only an event of the same rank tells how much time has passed: clocks of ranks differ.
            if line.rank == progress_line.rank and (is_last or not is_too_soon):
                self._show(*self._held)
                self._shown_at = _time_of(event)
                self._held = None
        if not isinstance(event, ProgressEvent):
            self._show(event, line)

    def flush(self) -> None:
        """Pass on the progress that is held back; the next progress is passed on at once."""
        held = self._held
        self._held = None
        self._shown_at = None
        if held is not None:
            self._show(*held)


def _time_of(event: Event) -> float:
    """Return when an event was written, in seconds since the epoch; now, if it has no reliable time."""
    if event.time is None or isinstance(event, OwnEvent):  # a script can give any time to its own event
        return time.time()
    return float(event.time)


class ReadableLog:
    """Writes a log for people: each line as it is, each event as a sentence, progress once in ten seconds.

    Args:
        write: Receives each line.
    """

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write, self._paced = write, Paced(self._say)

    def line(self, line: RankLine) -> None:
        """Write the line unchanged."""
        self._write(str(line))

    def event(self, event: Event, line: RankLine) -> None:
        """Write the event as a sentence; events of pace are left out, as they are for curves only."""
        self._paced.event(event, line)

    def flush(self) -> None:
        """Write the progress that is held back."""
        self._paced.flush()

    def _say(self, event: Event, line: RankLine) -> None:
        if not isinstance(event, PaceEvent):
            self._write(readable(line, event))


def tell(lines: Iterable[RankLine], *listeners: RankListener) -> None:
    """Deliver lines to listeners, each as an event or as an ordinary line."""
    for line in lines:
        event = decode(line.text)
        for listener in listeners:
            if event is None:
                listener.line(line)
            else:
                listener.event(event, line)


def flush(listeners: Iterable[RankListener]) -> None:
    """Flush listeners: this process stops following the attempt."""
    for listener in listeners:
        listener.flush()
