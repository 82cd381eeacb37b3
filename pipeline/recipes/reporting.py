"""Report what a recipe does: messages in its log, progress with speed and the time left, and its results."""

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from manycpu.pipeline.node.metrics import progress
from manycpu.pipeline.node.step_pace import set_samples_per_step
from manycpu.pipeline.spec.machine import bf16_warning, processor_flags


class Pace:
    """Measures a training's speed from its start, or from the step that it resumed from.

    Args:
        first_step: Steps that an earlier process has done.
        samples: Samples of a step of each rank.
        ranks: Number of ranks.
    """

    def __init__(self, first_step: int, samples: int, ranks: int) -> None:
        self._began = time.monotonic()
        self._first_step = first_step
        self._step_samples = samples * ranks
        set_samples_per_step(samples)  # for the pace that each rank reports by itself

    def report(self, step: int, total_steps: int, **values: Any) -> None:
        """Report progress: the step, speed, time left, and ``values``; nothing before a step is done."""
        steps_done = step - self._first_step
        seconds = time.monotonic() - self._began
        if steps_done > 0:
            progress(
                step=step,
                total_steps=total_steps,
                samples_per_second=round(steps_done * self._step_samples / seconds, 2),
                seconds_left=round((total_steps - step) * seconds / steps_done),
                **values,
            )


def say(message: str) -> None:
    """Write a line to stderr on rank 0, or where there are no ranks."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"manycpu: {message}\n")
        sys.stderr.flush()


def say_notes(notes: Iterable[str], env: Mapping[str, str], *, bf16: bool) -> None:
    """Write notes on options to the log, and a warning if bf16 is slow on this processor.

    With ``run.dtype`` bf16, the CPU plan of the run has that warning already.
    """
    for note in notes:
        say(note)
    if bf16 and env.get("MANYCPU_DTYPE") != "bf16":
        warning = bf16_warning(processor_flags())
        if warning:
            say(warning)


def write_results(folder: Path, results: Mapping[str, Any]) -> None:
    """Write ``all_results.json`` into a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=2, sort_keys=True)
    (folder / "all_results.json").write_text(text + "\n", encoding="utf-8")
