"""Report how fast this rank's steps are, for any program. A step is one call of the optimizer's ``step()``.

torch's DistributedDataParallel (DDP) measures how long a step waits for other ranks.
"""

import functools
import os
import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, Final

from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from manycpu.pipeline.node.emit import say

_REPORT_INTERVAL_S: Final = 10.0  # at least
_SAMPLES_PER_STEP: Final[list[int]] = [0]  # of this rank, as the only element; 0: not known
_WAIT_TIMES: Final = ("backward_comm_time", "backward_compute_comm_overlap_time")  # in nanoseconds
_WAIT_INTERVAL_S: Final = 0.05  # between two looks at them, as a look takes a tenth of a millisecond
_NANOSECONDS: Final = 1e9  # in a second
_MODELS: Final[list[weakref.ref[Any]]] = []  # those that DDP has wrapped, in their order
_MAX_DURATIONS: Final = 4096  # of steps since the last report
_MAX_OTHER_STEPS: Final = 8  # of other optimizers, after which the first one counts as no longer used


class StepPace:
    """Counts the steps of a process, and reports how long they take, at most once in ten seconds.

    The first step is not timed: it allocates and compiles what later steps reuse. The report has the median
    of the other steps, so that occasional work between two steps, such as an evaluation, does not count.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._process = clock, os.getpid()
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._other_steps = 0  # of other optimizers, since the last one of this optimizer
        self._steps = 0
        self._calls: int | None = None  # of collectives, up to the last step; None: not known
        self._alone = 0  # steps in which the process called no collective
        self._last = self._reported = 0.0  # the clock at the last step and at the last report
        self._seconds: deque[float] = deque(maxlen=_MAX_DURATIONS)  # of each step since the last report
        self._waits: deque[float] = deque(maxlen=_MAX_DURATIONS)  # seconds, of some of these steps
        self._wait: float | None = None  # the median in the last report; None: not known
        self._looked = 0.0  # the clock when a wait was last noted

    def stepped(self, optimizer: Optimizer) -> None:
        """Count a step of the first optimizer; a program may use several optimizers in one step.

        Steps of other optimizers do not count. After eight of them without a step of the first optimizer, the
        optimizer of the next step takes its place.
        """
        # None: this is the first step, or the program has dropped the first optimizer.
        first_optimizer = self._optimizer() if self._optimizer else None
        if (
            first_optimizer is not None
            and first_optimizer is not optimizer
            and self._other_steps < _MAX_OTHER_STEPS
        ):
            self._other_steps += 1
            return
        self._other_steps = 0
        if first_optimizer is not optimizer:
            self._optimizer = weakref.ref(optimizer)
        now, calls = self._clock(), _collectives()
        if self._steps:
            self._seconds.append(now - self._last)
            if calls is not None and calls == self._calls:  # no collective since the last step
                self._alone += 1
        else:  # the time until the first report begins with the first step
            self._reported = now
        self._steps += 1
        self._last, self._calls = now, calls
        if now - self._looked >= _WAIT_INTERVAL_S:
            self._looked = now
            self._waits.extend(islice(_waits(), 1))
        if now - self._reported >= _REPORT_INTERVAL_S:
            self.report()

    def trained_alone(self) -> str:
        """Return a warning if this rank exchanged nothing in most of its steps, else an empty text."""
        timed = max(0, self._steps - 1)  # the first step may follow a broadcast of the weights
        if self._alone * 2 <= timed:
            return ""
        return f"in {self._alone} of {timed} steps this rank exchanged nothing with the others"

    def report(self) -> None:
        """Report the median seconds of the steps since the last report, if there were any.

        A child that the program forked reports nothing: its steps are not the rank's.
        """
        if not self._seconds or os.getpid() != self._process:
            return
        seconds = statistics.median_low(self._seconds)
        self._seconds.clear()
        self._reported = self._clock()
        fields: dict[str, Any] = {"step": self._steps, "step_seconds": round(seconds, 6)}
        samples = _SAMPLES_PER_STEP[0]
        if seconds and samples:
            fields["samples_per_second"] = round(samples / seconds, 3)
        if self._waits:
            self._wait = statistics.median_low(self._waits)
            self._waits.clear()
        if self._wait is not None:  # at the end, the program may have dropped its model
            fields["wait_seconds"] = round(self._wait, 6)
        with suppress(OSError):  # a log that nothing reads any more must not end the training
            say("pace", **fields)


def _waits() -> Iterator[float]:
    """Yield for each model of DDP the seconds of a step in which nothing but gradients was on its way."""
    for model in filter(None, (reference() for reference in _MODELS)):
        with suppress(Exception):  # torch does not promise these values
            times = model._get_ddp_logging_data()  # noqa: SLF001 - no other way
            on_the_way, overlapped = (int(times[name]) for name in _WAIT_TIMES)
            yield max(0, on_the_way - overlapped) / _NANOSECONDS


def _collectives() -> int | None:
    """Count the collectives that this process has called, of all groups; None: the backend does not count."""
    try:
        groups: list[Any] = [*distributed_c10d._world.pg_map]  # noqa: SLF001 - no other way
        return sum(int(group._get_sequence_number_for_group()) for group in groups)  # noqa: SLF001
    except RuntimeError:
        return None


def set_samples_per_step(samples: int) -> None:
    """Set how many samples this rank takes in each step of its optimizer; 0: not known."""
    _SAMPLES_PER_STEP[0] = samples


def watch() -> StepPace:
    """Count the steps of this process from now on, and note the models that DDP wraps, to report waits."""
    pace = StepPace()
    register_optimizer_step_post_hook(lambda optimizer, *_: pace.stepped(optimizer))
    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _MODELS.append(weakref.ref(self))
        with suppress(Exception):  # torch does not promise it
            self._set_ddp_runtime_logging_sample_rate(1)  # else it measures each hundredth step

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]
    return pace
