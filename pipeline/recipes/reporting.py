"""Report what a recipe does: messages in its log, and progress with speed and the time left."""

import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from manycpu.pipeline.node.metrics import progress
from manycpu.pipeline.spec.machine import bf16_warning, processor_flags

__all__ = ["Pace", "bf16_notes", "say"]


class Pace:
    """Measures a training's speed from its start, or from the step that it resumed from.

    Args:
        first_step: Steps that an earlier process has done.
    """

    def __init__(self, first_step: int = 0) -> None:
        self._began, self._first = time.monotonic(), first_step

    def report(self, step: int, total_steps: int, batch: int, **values: Any) -> None:
        """Report a step as progress; nothing before the first step is done.

        Args:
            step: Steps done.
            total_steps: Steps in all.
            batch: Samples of a step, of all ranks.
            values: Other fields of progress: epoch, loss, learning_rate, grad_norm.
        """
        done, seconds = step - self._first, time.monotonic() - self._began
        if done > 0:
            progress(
                step=step,
                total_steps=total_steps,
                samples_per_second=round(done * batch / seconds, 2),
                seconds_left=round((total_steps - step) * seconds / done),
                **values,
            )


def say(message: str) -> None:
    """Write a line to stderr on rank 0, or where there are no ranks."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"manycpu: {message}\n")
        sys.stderr.flush()


def bf16_notes(env: Mapping[str, str], *, bf16: bool) -> list[str]:
    """Explain what bf16 costs on this processor, if an option asks for it; the plan does for run.dtype."""
    warning = bf16_warning(processor_flags()) if bf16 and env.get("MANYCPU_DTYPE") != "bf16" else None
    return [warning] if warning else []
