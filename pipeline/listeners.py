"""Who hears what the ranks of an attempt write, on every target and in every way of waiting.

A listener is given to whatever waits: :func:`manycpu.pipeline.verbs.wait.wait`, or TrainOperator and its
triggers (``operators/following.py``). It hears each line and each event once, in the order in which a rank
wrote them, also where a trigger goes on from where a worker has come to; whoever attaches to an attempt anew
hears it from its beginning. On Kubernetes at most 1,000
ordinary lines a second are passed on, and as many events of progress.
"""

import logging
import time
from collections.abc import Callable, Iterable
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

__all__ = ["Guarded", "Paced", "RankListener", "ReadableLog", "RunListener", "Silent", "flush", "tell"]

_LOG = logging.getLogger(__name__)

_EVERY: Final = 10.0
"""Seconds between two lines of progress."""


class RankListener(Protocol):
    """Somebody who hears what the ranks of an attempt write.

    What it raises ends :func:`manycpu.pipeline.verbs.wait.wait`, but no training. A whole run guards its
    listeners (:class:`Guarded`).
    """

    def line(self, line: RankLine) -> None:
        """Hear an ordinary line of a rank, or of the launcher where its rank is None."""

    def event(self, event: Event, line: RankLine) -> None:
        """Hear what a rank reports, and the line that it came in."""

    def flush(self) -> None:
        """Hear that this process hears no more of the attempt; another one may go on."""


class RunListener(RankListener, Protocol):
    """Somebody who hears how a run goes, with all that its ranks write."""

    def begin(self, verb: str) -> None:
        """Hear that a verb begins."""

    def end(self, verb: str, seconds: float, result: str) -> None:
        """Hear how a verb ended."""

    def progress(self, done: int, total: int) -> None:
        """Hear how many bytes of a transfer are done."""

    def finding(self, finding: Finding) -> None:
        """Hear what is no obstacle: what preflight found, or an attempt that was started otherwise."""

    def report(self, written: Report, path: str) -> None:
        """Hear what the run did, and the path or URL of report.json."""


class Silent:
    """A listener that does nothing; whoever derives from it hears only what it overrides."""

    def line(self, line: RankLine) -> None: ...
    def event(self, event: Event, line: RankLine) -> None: ...
    def flush(self) -> None: ...
    def begin(self, verb: str) -> None: ...
    def end(self, verb: str, seconds: float, result: str) -> None: ...
    def progress(self, done: int, total: int) -> None: ...
    def finding(self, finding: Finding) -> None: ...
    def report(self, written: Report, path: str) -> None: ...


class Guarded:
    """Passes everything to a listener until it raises: it is called no more then, and the run continues.

    Only what is no ``Exception`` gets through, such as KeyboardInterrupt.
    """

    def __init__(self, listener: RankListener) -> None:
        self._listener: RankListener = listener

    def line(self, line: RankLine) -> None:
        self._call("line", line)

    def event(self, event: Event, line: RankLine) -> None:
        self._call("event", event, line)

    def flush(self) -> None:
        self._call("flush")

    def begin(self, verb: str) -> None:
        self._call("begin", verb)

    def end(self, verb: str, seconds: float, result: str) -> None:
        self._call("end", verb, seconds, result)

    def progress(self, done: int, total: int) -> None:
        self._call("progress", done, total)

    def finding(self, finding: Finding) -> None:
        self._call("finding", finding)

    def report(self, written: Report, path: str) -> None:
        self._call("report", written, path)

    def _call(self, name: str, *args: Any) -> None:
        try:
            getattr(self._listener, name)(*args)
        except Exception as error:  # noqa: BLE001 - whatever a listener raises, the training has not failed
            who, self._listener = self._listener, Silent()
            said = "%s failed, and is called no more; the run continues: %s"
            _LOG.warning(said, type(who).__name__, error, exc_info=True)


class Paced:
    """Passes events on, of progress only what people read: the first, one in ten seconds, and the last.

    By the time at which the ranks wrote it: a log that is read later shows what was shown before.

    Args:
        show: Is given the events that are passed on.
    """

    def __init__(self, show: Callable[[Event, RankLine], object]) -> None:
        self._show = show
        self._shown: float | None = None
        self._held: tuple[ProgressEvent, RankLine] | None = None

    def event(self, event: Event, line: RankLine) -> None:
        """Pass an event on, or hold it back where it is progress that comes too soon."""
        if isinstance(event, ProgressEvent):
            self._held = (event, line)
        elif isinstance(event, (ErrorEvent, ExitEvent)):  # after which ranks may begin anew
            self.flush()
        if self._held is not None and self._is_due(event, line, *self._held):
            self._show(*self._held)
            self._shown, self._held = _time_of(event), None
        if not isinstance(event, ProgressEvent):
            self._show(event, line)

    def flush(self) -> None:
        """Pass on the last progress; what comes next counts as the first."""
        held, self._held, self._shown = self._held, None, None
        if held is not None:
            self._show(*held)

    def _is_due(self, event: Event, line: RankLine, held: ProgressEvent, by: RankLine) -> bool:
        """Whether an event brings about what is held, by the clock of the rank that wrote both."""
        ends = held.step is not None and held.step == held.total_steps
        too_soon = self._shown is not None and 0 <= _time_of(event) - self._shown < _EVERY
        return line.rank == by.rank and (ends or not too_soon)


def _time_of(event: Event) -> float:
    if event.time is None or isinstance(event, OwnEvent):  # whose time may be anything
        return time.time()
    return float(event.time)


class ReadableLog:
    """Writes every line for people, events as sentences; of progress no flood.

    Args:
        write: Is given each line.
    """

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write, self._paced = write, Paced(self._say)

    def line(self, line: RankLine) -> None:
        """Write it as it is."""
        self._write(str(line))

    def event(self, event: Event, line: RankLine) -> None:
        """Write its sentence; how fast each rank goes is for curves."""
        self._paced.event(event, line)

    def flush(self) -> None:
        """Write the last progress."""
        self._paced.flush()

    def _say(self, event: Event, line: RankLine) -> None:
        if not isinstance(event, PaceEvent):
            self._write(readable(line, event))


def tell(lines: Iterable[RankLine], *listeners: RankListener) -> None:
    """Have listeners hear lines, each as what it is: an event or an ordinary line."""
    for line in lines:
        event = decode(line.text)
        for listener in listeners:
            if event is None:
                listener.line(line)
            else:
                listener.event(event, line)


def flush(listeners: Iterable[RankListener]) -> None:
    """Have listeners pass on what they hold back: this process hears no more of the attempt."""
    for listener in listeners:
        listener.flush()
