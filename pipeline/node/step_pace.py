"""Tell how fast this rank's steps go, whatever program makes them: a step is one of its optimizer.

Most of what a rank waits for others is told by torch's DistributedDataParallel, which times it in some steps.
"""

import functools
import os
import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from manycpu.pipeline.node.emit import say
from manycpu.pipeline.spec.events import PACE_INTERVAL_S, samples_per_step

__all__ = ["StepPace", "watch"]

_WAITED: Final = ("avg_backward_comm_time", "avg_backward_compute_comm_overlap_time")  # nanoseconds
_NANO: Final = 1e9
_MODELS: Final[list[weakref.ref[Any]]] = []
_KEPT: Final = 4096  # durations of steps
_OUT_OF_USE: Final = 8  # steps of others after which an optimizer makes no more


class StepPace:
    """Counts the steps of a process, and tells how long they take, at most once in ten seconds.

    The first step is not timed: much is made in it that later ones find. Of the others the median is told:
    what is done between some of them, such as an evaluation, is none of theirs.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._process = clock, os.getpid()
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._others = 0  # steps of other optimizers since one of this
        self._steps = 0
        self._last = self._told = 0.0
        self._seconds: deque[float] = deque(maxlen=_KEPT)

    def stepped(self, optimizer: Optimizer) -> None:
        """Count a step, of one optimizer: others work for the same step, until the first is out of use."""
        first = self._optimizer() if self._optimizer else None
        if first is not None and first is not optimizer and self._others < _OUT_OF_USE:
            self._others += 1
            return
        self._others = 0
        if first is not optimizer:
            self._optimizer = weakref.ref(optimizer)
        now = self._clock()
        if self._steps:
            self._seconds.append(now - self._last)
        else:
            self._told = now
        self._steps += 1
        self._last = now
        if now - self._told >= PACE_INTERVAL_S:
            self.tell()

    def tell(self) -> None:
        """Tell the pace since the last time; nothing where there was no step, or in a child of the rank."""
        if not self._seconds or os.getpid() != self._process:
            return
        seconds = statistics.median_low(self._seconds)
        self._seconds.clear()
        self._told = self._clock()
        fields: dict[str, Any] = {"step": self._steps, "step_seconds": round(seconds, 6)}
        if seconds and (samples := samples_per_step()):
            fields["samples_per_second"] = round(samples / seconds, 3)
        if (waited := _waited()) is not None:
            fields["wait_seconds"] = round(waited, 6)
        with suppress(OSError):  # nobody reads any more: no reason for a training to end
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

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        _MODELS.append(weakref.ref(self))

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]


def _waited() -> float | None:
    """Read for how many seconds of a step gradients were on their way and nothing was computed; or None."""
    for model in [model for made in _MODELS if (model := made()) is not None]:
        with suppress(Exception):  # what torch tells of itself is no promise
            times = model._get_ddp_logging_data()  # noqa: SLF001 - no other way
            on_the_way, overlapped = (int(times[name]) for name in _WAITED)
            return max(0, on_the_way - overlapped) / _NANO
    return None
