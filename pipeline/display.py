"""Show a run in a terminal with progress bars, or as plain lines where there is none."""

import io
import logging
import select
import time
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from manycpu.pipeline.listeners import Paced
from manycpu.pipeline.run_report import Report
from manycpu.pipeline.spec.errors import Finding
from manycpu.pipeline.spec.event_types import (
    BackendEvent,
    Event,
    ExitEvent,
    MetricsEvent,
    PaceEvent,
    ProgressEvent,
    WarningEvent,
    readable,
)
from manycpu.pipeline.spec.events import RankLine
from manycpu.pipeline.spec.observed import Series
from manycpu.pipeline.spec.tracking import place_in_words
from manycpu.pipeline.terminal_curve import draw, spark

__all__ = ["Display", "failure", "lossy", "summary"]

_IN_SUMMARY = (BackendEvent, ExitEvent, MetricsEvent, PaceEvent)
_SPARK, _CURVE = 16, (60, 6)  # characters of a curve beside a bar; of one below, and its lines
_PLAIN_EVERY_S = 10.0  # seconds between two plain lines of a transfer, and before the first


class _LossyFile(io.FileIO):
    """An open file that drops what it cannot take."""

    def write(self, data: Any) -> int:
        try:
            while (written := super().write(data)) is None:  # a pipe that does not block, and is full
                select.select([], [self], [])
        except OSError:
            return len(data)
        return written


def lossy(stream: TextIO) -> TextIO:
    """Make a stream that drops what cannot be written: to a closed terminal or pipe, or a full disk.

    Args:
        stream: Such as sys.stdout; returned as it is where it is no file, such as in a notebook.
    """
    try:
        file = _LossyFile(stream.fileno(), "w", closefd=False)
    except (AttributeError, OSError):  # None where it was closed before the start
        return stream
    buffered = io.BufferedWriter(file)
    return io.TextIOWrapper(buffered, stream.encoding, stream.errors, line_buffering=True)


class Display:
    """Shows how a run goes: one line for each verb and each line of a rank; bars only on a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._bar: TaskID | None = None
        self._printed_at = 0.0
        self._losses = Series()
        self._paced = Paced(self._say)
        self._log = _Log(self)

    def __enter__(self) -> Self:
        self._bars.start()
        self._log.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._log.close()
        self._bars.stop()

    def begin(self, verb: str) -> None:
        """Show the bar of a verb."""
        self._bar, self._printed_at = self._bars.add_task(verb, total=None, text=""), time.monotonic()

    def end(self, verb: str, seconds: float, result: str) -> None:
        """Remove the bar, and print the verb's result."""
        self.flush()
        if self._bar is not None:
            self._bars.remove_task(self._bar)
        self._bar = None
        self._print(f"{verb:<8} {result} in {seconds:.1f} s", "red" if result == "failed" else "green")

    def progress(self, done: int, total: int) -> None:
        """Move the bar of a transfer; without a bar, print a line every ten seconds."""
        self._move(done, total, f"{decimal(done)} of {decimal(total)}")
        now = time.monotonic()
        if not self._console.is_terminal and now >= self._printed_at + _PLAIN_EVERY_S:
            self._printed_at = now
            self._print(f"  {100 * done // total if total else 100} % of {decimal(total)}")

    def line(self, line: RankLine) -> None:
        """Print a rank's line."""
        self._print(f"  {line}")

    def event(self, event: Event, line: RankLine) -> None:
        """Print what a rank reports; progress moves the bar instead where there is one."""
        if isinstance(event, ProgressEvent) and self._console.is_terminal:
            self._losses.add(event.step, float(event.time or 0), event.loss)
            text = f"{spark(self._losses, _SPARK)} {event.sentence()}".strip()
            self._move(event.step or 0, event.total_steps, text)
        else:
            self._paced.event(event, line)

    def flush(self) -> None:
        """Print the last progress, where there is no bar."""
        self._paced.flush()

    def finding(self, finding: Finding) -> None:
        """Print a warning of preflight."""
        self._print(f"  warning: {finding}", "yellow")

    def logged(self, text: str, style: str = "") -> None:
        """Print a log record of the package, such as of an image's build."""
        self._print(f"  {text}", style)

    def report(self, written: Report, path: str) -> None:
        """Print a summary of the report."""
        summary(self._console, written, path)

    def _say(self, event: Event, line: RankLine) -> None:
        if not isinstance(event, _IN_SUMMARY):
            self._print(f"  {readable(line, event)}", "yellow" if isinstance(event, WarningEvent) else "")

    def _move(self, done: float, total: float | None, text: str) -> None:
        if self._bar is not None:
            self._bars.update(self._bar, completed=done, total=total, text=text)

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


class _Log(logging.Handler):
    """Shows what is logged below ``manycpu`` while a display is open."""

    def __init__(self, display: Display) -> None:
        super().__init__(logging.INFO)
        self._display, self._logger = display, logging.getLogger("manycpu")
        self._before = self._logger.level

    def open(self) -> None:
        self._logger.addHandler(self)
        self._logger.setLevel(logging.INFO)

    def close(self) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._before)
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._display.logged(record.getMessage(), "yellow" if record.levelno > logging.INFO else "")
        except Exception:  # noqa: BLE001 - as every handler of logging: what logs is not what fails
            self.handleError(record)


def summary(console: Console, report: Report, path: str) -> None:
    """Print the verbs, the metrics and, last, where the report is; control characters are shown escaped."""
    console.print(_table(("verb", "seconds", "result"), _verbs(report)))
    if report.metrics:
        console.print(_table(("metric", "value"), [(name, _value(v)) for name, v in report.metrics.items()]))
    for line in _curve(report):
        console.print(line, markup=False, highlight=False)
    console.print(f"{report.state}: {_escaped(_scale(report))}", markup=False, highlight=False)
    for leftover in report.left_behind:
        console.print(f"left behind: {_escaped(leftover)}", style="red", markup=False)
    if report.advice:
        console.print(_escaped(report.advice), style="yellow", markup=False, highlight=False, soft_wrap=True)
    for name, place in report.trackers.items():
        words = _escaped(place_in_words(name, place))
        console.print(words, markup=False, highlight=False, soft_wrap=True)
    console.print(f"report: {_escaped(path)}", markup=False, highlight=False, soft_wrap=True)


def failure(console: Console, report: Report) -> None:
    """Print why the run failed, if it did; control characters are shown escaped."""
    for line in (report.error or "").splitlines():
        console.print(_escaped(line), style="red", markup=False, highlight=False, soft_wrap=True)


def _curve(report: Report) -> list[str]:
    """Draw the loss over its steps, with what it begins and ends with."""
    series = report.series.get("loss")
    lines = draw(series, *_CURVE) if series else []
    if series is None or not lines:
        return []
    first, last = _step(series.steps[0]), _step(series.steps[-1])
    steps = f" from step {first} to {last}" if None not in series.steps else ""
    return [*lines, f"loss {_value(series.values[0])} to {_value(series.values[-1])}{steps}"]


def _scale(report: Report) -> str:
    if report.world_size is None:
        return "no ranks met"
    used = f"backend {report.backend}" if report.backend else "which initialised no backend"
    if devices := sum(rank.devices or 0 for rank in report.ranks):
        used = f"{devices} devices of XLA"
    return f"{report.world_size} ranks on {len(report.hosts)} host(s), {used}"


def _verbs(report: Report) -> list[tuple[str, str, str]]:
    return [(name, f"{record.seconds:.1f}", record.result) for name, record in report.verbs.items()]


def _table(head: tuple[str, ...], rows: list[Any]) -> Table:
    table = Table(*head)
    for row in rows:
        # Brackets in a metric's name are no markup, and what would steer the terminal is shown.
        table.add_row(*(Text(_escaped(cell)) for cell in row))
    return table


def _value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _step(step: float | None) -> str:
    return f"{step:g}" if isinstance(step, float) else str(step)  # an integer may be larger than any float


def _escaped(text: str) -> str:
    r"""Show what a terminal would obey, or cannot show.

    >>> _escaped("\x1b[2J loss")
    '\\x1b[2J loss'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
