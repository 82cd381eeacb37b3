"""Tell how fast this rank's steps go, whatever program makes them: a step is one of its optimizer.

Most of what a rank waits for others is told by torch's DistributedDataParallel, which times it in some steps.
"""

import os
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from manycpu.pipeline.node.emit import say
from manycpu.pipeline.spec.pace import EVERY, samples_of_a_step

__all__ = ["StepPace", "watch"]

_WAITED: Final = ("avg_backward_comm_time", "avg_backward_compute_comm_overlap_time")  # nanoseconds
_NANO: Final = 1e9
_MODELS: Final[weakref.WeakSet[Any]] = weakref.WeakSet()


class StepPace:
    """Counts the steps of a process, and tells how long they take, at most once in ten seconds.

    The first step is not timed: much is made in it that later ones find.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._process = clock, os.getpid()
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._steps = self._told_steps = 0
        self._told_at = 0.0

    def stepped(self, optimizer: Optimizer) -> None:
        """Count a step of the first optimizer that made one: others work for the same step."""
        first = self._optimizer() if self._optimizer else None
        if first is None:
            self._optimizer = weakref.ref(optimizer)
        elif first is not optimizer:
            return
        self._steps += 1
        if self._steps == 1:
            self._told_steps, self._told_at = 1, self._clock()
        elif self._clock() - self._told_at >= EVERY:
            self.tell()

    def tell(self) -> None:
        """Tell the pace since the last time; nothing where there was no step, or in a child of the rank."""
        steps, now = self._steps - self._told_steps, self._clock()
        if steps < 1 or os.getpid() != self._process:
            return
        seconds = (now - self._told_at) / steps
        self._told_steps, self._told_at = self._steps, now
        fields: dict[str, Any] = {"step": self._steps, "step_seconds": round(seconds, 6)}
        if seconds and (samples := samples_of_a_step()):
            fields["samples_per_second"] = round(samples / seconds, 3)
        if (waited := _waited()) is not None:
            fields["wait_seconds"] = round(waited, 6)
        say("pace", **fields)


def watch() -> StepPace:
    """Count the steps of this process from now on."""
    pace = StepPace()

    def stepped(optimizer: Optimizer, *_: Any) -> None:
        pace.stepped(optimizer)

    register_optimizer_step_post_hook(stepped)
    _note_models()
    return pace


def _note_models() -> None:
    """Know each model whose gradients torch brings together."""
    made = DistributedDataParallel.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        _MODELS.add(self)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]


def _waited() -> float | None:
    """Read for how many seconds of a step gradients were on their way and nothing was computed; or None."""
    for model in list(_MODELS):
        with suppress(Exception):  # what torch tells of itself is no promise
            times = model._get_ddp_logging_data()  # noqa: SLF001 - no other way
            on_the_way, overlapped = (int(times[name]) for name in _WAITED)
            return max(0, on_the_way - overlapped) / _NANO
    return None
