"""Report how fast a training goes, since it began or went on."""

import time
from typing import Any

from manycpu.pipeline.node.metrics import progress

__all__ = ["Pace"]


class Pace:
    """Knows when a training began, and reports its progress.

    Args:
        first_step: Steps that an earlier process has done.
    """

    def __init__(self, first_step: int = 0) -> None:
        self._began, self._first = time.monotonic(), first_step

    def report(self, step: int, total_steps: int, batch: int, **values: Any) -> None:
        """Report a step; nothing before the first one is done.

        Args:
            step: Steps done.
            total_steps: Steps in all.
            batch: Samples of a step, of all ranks.
            values: What else there is: epoch, loss, learning_rate, grad_norm.
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
