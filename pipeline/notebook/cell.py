"""Show a run in a notebook's cell: the lines of its ranks, and in Jupyter one block with a live curve."""

import hashlib
import html
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from rich.filesize import decimal

from manycpu.pipeline.listeners import Paced, Silent
from manycpu.pipeline.run_report import Report
from manycpu.pipeline.spec.errors import Finding, ManycpuError
from manycpu.pipeline.spec.event_types import (
    ErrorEvent,
    Event,
    ExitEvent,
    MetricsEvent,
    ProgressEvent,
    ProofEvent,
    ResultEvent,
    WarningEvent,
)
from manycpu.pipeline.spec.events import RankLine
from manycpu.pipeline.spec.observed import Series
from manycpu.pipeline.spec.state import describe_exit

_DRAW_INTERVAL_S: Final = 0.5
_WIDTH, _HEIGHT = 480, 120  # pixels of the curve
_TRACEBACK: Final = "Traceback (most recent call last):"
_CHAINED: Final = ("direct cause of the following exception:", "another exception occurred:")
"""Ends of the line between two tracebacks of which the first is a cause of the second."""
_MAX_LINE_CHARACTERS: Final = 2000  # of a line that is kept
_MAX_TAIL_LINES: Final = 500  # that are kept of each rank, from its last traceback on
_VALUE_IS: Final = "the training succeeded, but what the function returned"  # beginning of error messages
Failure = tuple[int, str, str]
"""A rank, its host, and its traceback."""


def block_of_cell() -> Any | None:
    """Open a block of output in the cell that runs, and return the handle that draws it again.

    None: this program does not run in a notebook.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is None or not hasattr(shell, "kernel"):  # IPython in a terminal has no kernel
        return None
    from IPython.display import display

    return display({"text/plain": ""}, raw=True, display_id=True)  # type: ignore[no-untyped-call]


class Returned:
    """What rank 0 returned: a value in its event, or in a file that the event names.

    Args:
        fix: What the user can do if the file cannot be read; it is a part of the error.
    """

    def __init__(self, fix: str) -> None:
        self._fix, self._value = fix, None
        # What `value` raises; None: the value was read. It stays as it is here if the value's file is gone.
        self._error: ManycpuError | None = ManycpuError(
            f"{_VALUE_IS} is gone: an earlier call has returned it, or was killed while it deleted the run",
            fix="The same call trains again now, or says what is kept of the run",
        )

    def read(self, result: ResultEvent | None, read_file: Callable[[str], bytes]) -> bool:
        """Read the value that the event ``result`` announces. Errors are raised later, by :meth:`value`.

        Args:
            result: The event of rank 0; None: the function has not returned on rank 0.
            read_file: Takes a sha256, and returns the content of the run's file with that digest.

        Returns:
            False if the value's file could not be read: it must be kept, because a later try may read it.
            Otherwise True.
        """
        match result:
            case None:
                self._error = ManycpuError(
                    "the training succeeded, but nothing came back from the function",
                    fix="It ends rank 0 itself, as sys.exit does: have it return",
                )
            case ResultEvent(message=str(why_not)):  # rank 0 could not send the value
                self._error = ManycpuError(f"the training succeeded, but {why_not}")
            case ResultEvent(sha256=str(digest)):
                try:
                    self._value, self._error = _unpickled(read_file(digest), digest), None
                except Exception as error:  # noqa: BLE001 - the model must be exported all the same
                    if isinstance(error, FileNotFoundError) and digest in str(error.filename):
                        return True  # its file was deleted: `_error` says already that the value is gone
                    self._error = ManycpuError(f"{_VALUE_IS} could not be read: {error}", fix=self._fix)
                    self._error.__cause__ = error
                    return False
            case _:  # the event has the value itself
                self._value, self._error = result.value, None
        return True

    def value(self) -> Any:
        """Return what rank 0 returned.

        Raises:
            ManycpuError: The value could not be sent or read, is gone, or never came because the function
                ended its process.
        """
        if self._error is not None:
            raise self._error
        return self._value

    def add_to(self, error: BaseException) -> None:
        """Attach the value, if it was read, to the error of a later verb: otherwise it would be lost."""
        if self._error is None:
            error.returned = self._value  # type: ignore[attr-defined]
            error.add_note(
                "The training succeeded: what the function returned is this error's `returned`, "
                "in a notebook sys.last_value.returned"
            )


def _unpickled(content: bytes, digest: str) -> Any:
    """Unpickle the content of a file; raise ValueError if its sha256 is not ``digest``."""
    import cloudpickle

    if hashlib.sha256(content).hexdigest() != digest:
        raise ValueError("it was changed since")
    return cloudpickle.loads(content)


class CellDisplay(Silent):
    """Shows a run in a cell, and remembers how ranks failed.

    Args:
        block: IPython's handle of a block in the cell. It is drawn again and again while the run continues:
            step, loss curve, throughput and time left. None: only print lines.
    """

    def __init__(self, block: Any | None) -> None:
        self._block, self._paced = block, Paced(self._say_progress)
        self._tails: dict[int, list[str]] = {}  # rank -> its last lines
        self._meeting: str | None = None  # name of the last start of all ranks: a restart has a new one
        self._ranks_that_raised: set[int] = set()
        self._failures: list[Failure] = []
        self._warned: set[str] = set()
        # What the block shows: the verb or the final state, its details, and what the training last reported.
        self._title, self._subtitle, self._progress_text, self._metrics_text = "", "", "", ""
        self._losses = Series()
        self._fraction_done: float | None = None
        self._last_drawn_at = 0.0

    def say(self, text: str) -> None:
        """Print a text into the cell; do nothing if that fails, because it must not fail the run."""
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        with suppress(OSError, ValueError):  # a closed terminal or stream, a full disk
            # "replace": the encoding may lack a character.
            print(text.encode(encoding, "replace").decode(encoding), flush=True)  # noqa: T201 - into the cell

    def warn(self, text: str) -> None:
        """Print a warning; do nothing if the same text was printed before, such as for another rank."""
        if text not in self._warned:
            self._warned.add(text)
            self.say(f"warning: {text}")

    def begin(self, verb: str) -> None:
        """Show in the block which verb runs now."""
        self._title = "training" if verb == "wait" else verb
        self._subtitle, self._fraction_done = "", None
        self._draw()

    def progress(self, done: int, total: int) -> None:
        """Show in the block how many bytes of a copy are done."""
        self._subtitle = f"{decimal(done)} of {decimal(total)}"
        self._fraction_done = done / total if total else None
        self._draw()

    def finding(self, finding: Finding) -> None:
        self.warn(str(finding))

    def line(self, line: RankLine) -> None:
        """Print a line: unchanged if it is of rank 0 or of no rank, else with the name of its rank."""
        if line.rank is not None:
            self._append_to_tail(line.rank, line.text)
        self.say(line.text if line.rank in (0, None) else str(line))

    def event(self, event: Event, line: RankLine) -> None:
        """Show progress and warnings, and remember how a rank ended; without a block, print progress."""
        match event:
            case ProofEvent() if event.meeting != self._meeting:  # ranks were restarted: forget failures
                self._meeting, self._ranks_that_raised, self._failures = event.meeting, set(), []
            case ExitEvent() if event.code != 0 and line.rank is not None:
                trace = "\n".join(self._tails.get(line.rank, ()))
                self._failures.append((line.rank, event.host, trace or describe_exit(event.code)))
            case ErrorEvent() if line.rank is not None:
                if event.kind != "Refusal":  # a refusal may only mean that another rank is missing
                    self._ranks_that_raised.add(line.rank)
                # A script's traceback is among the lines of the rank already.
                if event.message[:_MAX_LINE_CHARACTERS] not in "\n".join(self._tails.get(line.rank, ())):
                    self._append_to_tail(line.rank, event.message)
            case WarningEvent():
                self.warn(event.message)
            case ProgressEvent() | MetricsEvent():
                self._show_progress(event)
        if self._block is None:
            self._paced.event(event, line)

    def flush(self) -> None:
        self._paced.flush()

    def report(self, written: Report, path: str) -> None:
        """Show in the block how the run ended, and where its report is; :meth:`close` draws it."""
        self._title, self._subtitle, self._fraction_done = str(written.state), f"report: {path}", None

    def close(self) -> None:
        """Draw the block's last state."""
        self._last_drawn_at = 0.0
        with suppress(Exception):  # a display must not fail the run
            self._draw()

    def failure(self) -> Failure | None:
        """Return the first failed rank that raised an error, or else the first that failed.

        When a rank raises, other ranks fail too, because they wait for it in vain. None: no rank failed.
        """
        for failure in self._failures:
            rank, _, _ = failure
            if rank in self._ranks_that_raised:
                return failure
        return self._failures[0] if self._failures else None

    def _append_to_tail(self, rank: int, text: str) -> None:
        """Keep the last lines of a rank, from the beginning of its last traceback on."""
        tail = self._tails.setdefault(rank, [])
        # A new traceback replaces the lines before it. A chained one does not: a line that says so, and an
        # empty line, precede it.
        if text == _TRACEBACK and not any(line.endswith(_CHAINED) for line in tail[-2:]):
            tail.clear()
        tail.append(text[:_MAX_LINE_CHARACTERS])
        del tail[:-_MAX_TAIL_LINES]

    def _say_progress(self, event: Event, line: RankLine) -> None:  # noqa: ARG002 - progress is of rank 0
        """Print an event of progress or metrics as a sentence."""
        if isinstance(event, (ProgressEvent, MetricsEvent)):
            self.say(event.sentence())

    def _show_progress(self, event: ProgressEvent | MetricsEvent) -> None:
        """Put an event's progress and loss, or its metrics, into the block, and draw it."""
        if isinstance(event, MetricsEvent):
            self._metrics_text = ", ".join(
                f"{name} {metric:.4g}" if isinstance(metric, float) else f"{name} {metric}"
                for name, metric in event.values.items()
            )
        else:
            self._progress_text = event.sentence()
            self._losses.add(event.step, float(event.time or 0), event.loss)
            if event.step is not None and event.total_steps:
                self._fraction_done = min(1.0, event.step / event.total_steps)
        self._draw()

    def _draw(self) -> None:
        """Draw the block again; do nothing within half a second of the last time, or without a block."""
        if self._block is None or time.monotonic() < self._last_drawn_at + _DRAW_INTERVAL_S:
            return
        self._last_drawn_at = time.monotonic()
        head = " · ".join(text for text in (self._title, self._subtitle) if text)
        rows = [text for text in (head, self._progress_text, self._metrics_text) if text]
        bar = ""
        if self._fraction_done is not None:
            bar = f'<progress value="{self._fraction_done:.4f}"></progress><br>'
        escaped_rows = "<br>".join(html.escape(row) for row in rows)
        page = f'<div class="manycpu">{curve(self._losses)}{bar}{escaped_rows}</div>'
        self._block.update({"text/plain": " · ".join(rows), "text/html": page}, raw=True)


def curve(series: Series) -> str:
    """Draw a loss over its steps as inline SVG; an empty text if there are fewer than two points."""
    losses = series.values
    if len(losses) < 2:  # noqa: PLR2004 - a line has two ends
        return ""
    # The place of a loss that was reported without a step is its number among all losses.
    steps = [
        number if step is None else step for number, step in zip(series.index, series.steps, strict=True)
    ]
    low, high = min(losses), max(losses)
    step_range = (steps[-1] - steps[0]) or 1  # never 0: both ranges are divisors below
    loss_range = (high - low) or 1
    points = " ".join(
        f"{(step - steps[0]) / step_range * _WIDTH:.1f},{(high - loss) / loss_range * _HEIGHT:.1f}"
        for step, loss in zip(steps, losses, strict=True)
    )
    # The box has 4 pixels above the curve, and 20 below it for the text.
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT + 20}" viewBox="0 -4 {_WIDTH} {_HEIGHT + 24}" role="img" '
        f'aria-label="loss {losses[0]:.4g} to {losses[-1]:.4g}">'
        f'<polyline points="{points}" fill="none" stroke="#1f77b4" stroke-width="1.5"/>'
        f'<text x="0" y="{_HEIGHT + 16}" font-size="12" fill="currentColor">loss {losses[0]:.4g} → '
        f"{losses[-1]:.4g}, steps {steps[0]:g} to {steps[-1]:g}</text></svg><br>"
    )
