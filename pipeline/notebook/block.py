"""The block of a notebook's cell that moves while a run goes on: step, loss curve, throughput, time left."""

import html
import sys
import time
from collections.abc import Mapping
from typing import Any, Final, Self

from rich.filesize import decimal

from manycpu.pipeline.run_report import Report
from manycpu.pipeline.spec.event_types import MetricsEvent, ProgressEvent
from manycpu.pipeline.spec.observed import Series

__all__ = ["Block", "curve"]

_EVERY: Final = 0.5  # seconds between two drawings
_WIDTH, _HEIGHT = 480, 120
_WORDS: Final = {"wait": "training"}


class Block:
    """One display of a cell, drawn anew at most twice a second.

    Args:
        handle: What IPython gives for a display that can be updated.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._step, self._text, self._progress, self._metrics = "", "", "", ""
        self._losses = Series()
        self._share: float | None = None
        self._drawn = 0.0

    @classmethod
    def of_cell(cls) -> Self | None:
        """Begin a block in the cell that runs; None where this is no notebook."""
        ipython = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython else None
        if shell is None or not hasattr(shell, "kernel"):
            return None
        from IPython.display import display

        return cls(display({"text/plain": ""}, raw=True, display_id=True))  # type: ignore[no-untyped-call]

    def step(self, verb: str) -> None:
        """Show the step that the run is at."""
        self._step, self._text, self._share = _WORDS.get(verb, verb), "", None
        self._draw()

    def transfer(self, done: int, total: int) -> None:
        """Show how much of a transfer is done."""
        self._text, self._share = f"{decimal(done)} of {decimal(total)}", done / total if total else None
        self._draw()

    def move(self, event: ProgressEvent | MetricsEvent) -> None:
        """Show how far the training is, and add its loss to the curve."""
        if isinstance(event, MetricsEvent):
            self._metrics = _listed(event.values)
        else:
            self._progress = event.sentence()
            self._losses.add(event.step, float(event.time or 0), event.loss)
            if event.step is not None and event.total_steps:
                self._share = min(1.0, event.step / event.total_steps)
        self._draw()

    def end(self, report: Report, path: str) -> None:
        """Show how the run ended."""
        self._step, self._text, self._share = str(report.state), f"report: {path}", None

    def close(self) -> None:
        """Draw it a last time."""
        self._drawn = 0.0
        self._draw()

    def _draw(self) -> None:
        if time.monotonic() < self._drawn + _EVERY:
            return
        self._drawn = time.monotonic()
        plain = " · ".join(filter(None, (self._step, self._text, self._progress, self._metrics)))
        self._handle.update({"text/plain": plain, "text/html": self._html()}, raw=True)

    def _html(self) -> str:
        head = " · ".join(filter(None, (self._step, self._text)))
        rows = [html.escape(text) for text in (head, self._progress, self._metrics) if text]
        bar = "" if self._share is None else f'<progress value="{self._share:.4f}"></progress><br>'
        return f'<div class="manycpu">{curve(self._losses)}{bar}{"<br>".join(rows)}</div>'


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {v:.4g}" if isinstance(v, float) else f"{name} {v}" for name, v in values.items()
    )


def curve(series: Series) -> str:
    """Draw a loss over its steps as inline SVG; nothing where there are not two points."""
    losses = series.values
    if len(losses) < 2:  # noqa: PLR2004 - a line has two ends
        return ""
    steps = [at if step is None else step for at, step in zip(series.index, series.steps, strict=True)]
    low, high = min(losses), max(losses)
    across, up = (steps[-1] - steps[0]) or 1, (high - low) or 1
    places = " ".join(
        f"{(step - steps[0]) / across * _WIDTH:.1f},{(high - loss) / up * _HEIGHT:.1f}"
        for step, loss in zip(steps, losses, strict=True)
    )
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT + 20}" viewBox="0 -4 {_WIDTH} {_HEIGHT + 24}" role="img" '
        f'aria-label="loss {losses[0]:.4g} to {losses[-1]:.4g}">'
        f'<polyline points="{places}" fill="none" stroke="#1f77b4" stroke-width="1.5"/>'
        f'<text x="0" y="{_HEIGHT + 16}" font-size="12" fill="currentColor">loss {losses[0]:.4g} → '
        f"{losses[-1]:.4g}, steps {steps[0]:g} to {steps[-1]:g}</text></svg><br>"
    )
