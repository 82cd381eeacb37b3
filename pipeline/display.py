"""Show a run in a terminal with bars and curves, or as plain lines if the output is no terminal."""

import io
import logging
import math
import select
import time
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, Final, Self, TextIO

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
from manycpu.pipeline.spec.state import RunState
from manycpu.pipeline.spec.tracking import place_in_words
from manycpu.pipeline.spec.words import counted

_ONLY_IN_SUMMARY: Final = (BackendEvent, ExitEvent, MetricsEvent, PaceEvent)
_SPARK_WIDTH: Final = 16  # characters of the curve beside a bar
_CURVE_SIZE: Final = (60, 6)  # characters and lines of the curve in a summary
_PLAIN_LINE_INTERVAL_S: Final = 10.0  # between two plain lines of a transfer, and before the first
_BRAILLE_EMPTY: Final = 0x2800  # code of the Braille character without dots: the bits of its dots are added
_BRAILLE_DOTS: Final = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a character, row by row
_BARS: Final = "▁▂▃▄▅▆▇█"


class _LossyFile(io.FileIO):
    """An open file that drops the data of a write that fails."""

    def write(self, data: Any) -> int:
        """Write data, and wait while a pipe is full; return how many bytes are written or dropped."""
        try:
            while (written := super().write(data)) is None:  # a pipe that does not block, and is full
                select.select([], [self], [])
        except OSError:
            return len(data)  # as if it were written: the caller must not try again
        return written


def lossy(stream: TextIO) -> TextIO:
    """Wrap a stream so that a failed write is dropped: a closed terminal or pipe, or a full disk.

    Args:
        stream: Such as sys.stdout; returned unchanged if it is None, or no file, such as in a notebook.
    """
    try:
        file = _LossyFile(stream.fileno(), "w", closefd=False)
    except (AttributeError, OSError):  # AttributeError: it is None, as it was closed before Python started
        return stream
    buffered = io.BufferedWriter(file)
    return io.TextIOWrapper(buffered, stream.encoding, stream.errors, line_buffering=True)


class Display:
    """Shows a run: one line for each verb and for each line of a rank; bars only on a terminal."""

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
        self._printed_at = 0.0  # when the last plain line was printed, or the verb began
        self._losses = Series()
        self._paced = Paced(self._print_event)
        self._log = _Log(self)

    def __enter__(self) -> Self:
        self._bars.start()
        self._log.open()
        return self

    def __exit__(self, *_: object) -> None:
        self._log.close()
        self._bars.stop()

    def begin(self, verb: str) -> None:
        """Show the bar of a verb."""
        self._bar = self._bars.add_task(verb, total=None, text="")
        self._printed_at = time.monotonic()

    def end(self, verb: str, seconds: float, result: str) -> None:
        """Print progress that was held back, remove the bar, and print the verb's result."""
        self.flush()
        if self._bar is not None:
            self._bars.remove_task(self._bar)
        self._bar = None
        self._print(f"{verb:<8} {result} in {seconds:.1f} s", "red" if result == "failed" else "green")

    def progress(self, done: int, total: int) -> None:
        """Move the bar of a transfer; if the output is no terminal, print a line every ten seconds."""
        self._move_bar(done, total, f"{decimal(done)} of {decimal(total)}")
        now = time.monotonic()
        if not self._console.is_terminal and now >= self._printed_at + _PLAIN_LINE_INTERVAL_S:
            self._printed_at = now
            percent = 100 * done // total if total else 100
            self._print(f"  {percent} % of {decimal(total)}")

    def line(self, line: RankLine) -> None:
        """Print a rank's line."""
        self._print(f"  {line}")

    def event(self, event: Event, line: RankLine) -> None:
        """Print an event of a rank; on a terminal, an event of progress moves the bar instead."""
        if isinstance(event, ProgressEvent) and self._console.is_terminal:
            self._losses.add(event.step, float(event.time or 0), event.loss)
            text = f"{spark(self._losses, _SPARK_WIDTH)} {event.sentence()}".strip()
            self._move_bar(event.step or 0, event.total_steps, text)
        else:
            self._paced.event(event, line)

    def flush(self) -> None:
        """Print progress that is held back; on a terminal there is none, as the bar shows it."""
        self._paced.flush()

    def finding(self, finding: Finding) -> None:
        """Print a warning of preflight."""
        self._print(f"  warning: {finding}", "yellow")

    def logged(self, text: str, style: str = "") -> None:
        """Print a log record of manycpu, such as that of an image's build."""
        self._print(f"  {text}", style)

    def report(self, written: Report, path: str) -> None:
        """Print a summary of the report; the error of a failed run has the advice on what is kept."""
        summary(self._console, written, path, advises=written.state is RunState.SUCCEEDED)

    def _print_event(self, event: Event, line: RankLine) -> None:
        """Print an event as a sentence; events that only the summary shows are left out."""
        if not isinstance(event, _ONLY_IN_SUMMARY):
            self._print(f"  {readable(line, event)}", "yellow" if isinstance(event, WarningEvent) else "")

    def _move_bar(self, done: float, total: float | None, text: str) -> None:
        if self._bar is not None:
            self._bars.update(self._bar, completed=done, total=total, text=text)

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


class _Log(logging.Handler):
    """Shows the log records of ``manycpu`` while a display is open."""

    def __init__(self, display: Display) -> None:
        super().__init__(logging.INFO)
        self._display = display
        self._logger = logging.getLogger("manycpu")
        self._level_before = self._logger.level

    def open(self) -> None:
        self._logger.addHandler(self)
        self._logger.setLevel(logging.INFO)

    def close(self) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level_before)
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._display.logged(record.getMessage(), "yellow" if record.levelno > logging.INFO else "")
        except Exception:  # noqa: BLE001 - as in every handler of logging: the code that logs must not fail
            self.handleError(record)


def summary(console: Console, report: Report, path: str, *, advises: bool = True) -> None:
    """Print a report's verbs and metrics, and its path last; control characters are escaped.

    ``advises``: whether to print the advice on what is kept.
    """
    verbs = [(name, f"{record.seconds:.1f}", record.result) for name, record in report.verbs.items()]
    console.print(_table(("verb", "seconds", "result"), verbs))
    if report.metrics:
        console.print(
            _table(
                ("metric", "value"), [(name, _format_value(value)) for name, value in report.metrics.items()]
            )
        )
    for line in _loss_curve_lines(report):
        console.print(line, markup=False, highlight=False)
    _print(console, f"{report.state}: {_scale(report)}")
    for leftover in report.left_behind:
        _print(console, f"left behind: {leftover}", "red")
    if report.advice and advises:
        _print(console, report.advice, "yellow")
    for name, place in report.trackers.items():
        _print(console, place_in_words(name, place))
    _print(console, f"report: {path}")


def _scale(report: Report) -> str:
    """Describe how many ranks joined the training, and what they computed and communicated with."""
    if report.world_size is None:
        return "no ranks met"
    if devices := sum(rank.devices or 0 for rank in report.ranks):
        means = f"{counted(devices, 'device')} of XLA"
    elif report.backend:
        means = f"backend {report.backend}"
    else:
        means = "which initialised no backend"
    return f"{counted(report.world_size, 'rank')} on {counted(len(report.hosts), 'host')}, {means}"


def _print(console: Console, text: str, style: str = "") -> None:
    console.print(escaped(text), style=style, markup=False, highlight=False, soft_wrap=True)


def failure(console: Console, report: Report) -> None:
    """Print why the run failed, if it did; control characters are escaped."""
    for line in (report.error or "").splitlines():
        _print(console, line, "red")


def _loss_curve_lines(report: Report) -> list[str]:
    """Draw the loss over its steps, with its first and last value below; empty: fewer than two points."""
    series = report.series.get("loss")
    if series is None:
        return []
    lines = draw(series, *_CURVE_SIZE)
    if not lines:
        return []
    steps = ""
    if None not in series.steps:
        ends = (series.steps[0], series.steps[-1])
        # An integer is not formatted as a float: it may be larger than any float.
        first, last = (f"{step:g}" if isinstance(step, float) else str(step) for step in ends)
        steps = f" from step {first} to {last}"
    return [*lines, f"loss {_format_value(series.values[0])} to {_format_value(series.values[-1])}{steps}"]


def _table(head: tuple[str, ...], rows: list[Any]) -> Table:
    """Make a table of texts; control characters in them are escaped."""
    table = Table(*head)
    for row in rows:
        # A Text has no markup: brackets in a metric's name stay.
        table.add_row(*(Text(escaped(cell)) for cell in row))
    return table


def _format_value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def escaped(text: str) -> str:
    r"""Escape control characters and what a terminal cannot show.

    >>> escaped("\x1b[2J loss")
    '\\x1b[2J loss'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def draw(series: Series, width: int, height: int) -> list[str]:
    """Draw a curve in Braille dots over its steps, or over the order of its values if it has no steps.

    ``width`` and ``height`` are in characters. Returns the lines, none for fewer than two finite points.
    """
    steps = [step for step in series.steps if step is not None]
    abscissas = steps if len(steps) == len(series.steps) else series.index
    points = [point for point in zip(abscissas, series.values, strict=True) if _is_finite(*point)]
    if len(points) < 2:  # noqa: PLR2004 - a line has two ends
        return []
    # A character has two columns and four rows of dots; y counts from the top.
    last_column, last_row = 2 * width - 1, 4 * height - 1
    xs = [round(x * last_column) for x in _scaled([x for x, _ in points])]
    ys = [round((1 - y) * last_row) for y in _scaled([y for _, y in points])]
    cells = [[0] * width for _ in range(height)]
    for (x0, y0), (x1, y1) in pairwise(zip(xs, ys, strict=True)):
        # The line between two points, in dots; at least 1, because both points may be the same dot.
        length = max(abs(x1 - x0), abs(y1 - y0), 1)
        for dot in range(length + 1):
            x = x0 + round((x1 - x0) * dot / length)
            y = y0 + round((y1 - y0) * dot / length)
            cells[y // 4][x // 2] |= _BRAILLE_DOTS[y % 4][x % 2]
    return ["".join(chr(_BRAILLE_EMPTY + cell) for cell in row) for row in cells]


def spark(series: Series, width: int) -> str:
    """Draw a curve in one line of bars, thinned to at most ``width`` characters.

    >>> spark(Series(index=[0, 1, 2], steps=[1, 2, 3], times=[1, 2, 3], values=[2.0, 1.0, 0.0]), 8)
    '█▄▁'
    """
    # At least four, since a thinned curve has at least four points: the last ones are drawn.
    values = [value for value in series.thinned(max(width, 4)).values if _is_finite(value)]
    heights = _scaled(values)[-width:]
    # Slightly less than the number of bars, so that height 1 is the last bar.
    return "".join(_BARS[int(height * (len(_BARS) - 0.01))] for height in heights)


def _is_finite(*numbers: float) -> bool:
    """Whether all numbers are finite; an integer is, even if it is too large for a float."""
    return all(isinstance(number, int) or math.isfinite(number) for number in numbers)


def _scaled(values: Sequence[float]) -> list[float]:
    """Scale values, the least to 0 and the greatest to 1; all to 0 if they are equal."""
    if not values:
        return []
    low, high = Fraction(min(values)), Fraction(max(values))  # as floats, their difference may overflow
    return [float((Fraction(value) - low) / ((high - low) or 1)) for value in values]
