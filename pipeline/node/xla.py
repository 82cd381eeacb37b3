"""Devices of XLA: one process drives all devices of its node, and divides each batch among them (SPMD).

The program trains with Accelerate, or takes its batches from torch_xla's loaders. Its batch size is that of
all devices together, and its loss that of one device.
"""

import functools
import importlib.util
import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch

from manycpu.pipeline.node import metrics
from manycpu.pipeline.node.emit import NodeExit, say, warn
from manycpu.pipeline.spec.exit_records import EXIT_BACKEND, EXIT_NOT_TOGETHER, EXIT_PROOF

Shapes = tuple[tuple[int, ...], ...]
_MISSING: Final = (
    "run.device: 'xla' is not available: this environment has no torch_xla. Install "
    "requirements/xla-torch.txt and requirements/xla.txt, and on TPUs 'torch_xla[tpu]' of the same version: "
    "docs/xla.md"
)
_MAX_WARNINGS: Final = 5  # about new shapes
_NARROWER_TYPE: Final = {torch.float32: torch.bfloat16, torch.float64: torch.float32}


class Compiled(NamedTuple):
    """The number of XLA's compilations so far, and the seconds that they took together."""

    number: int
    seconds: float

    def since(self, earlier: "Compiled") -> "Compiled":
        """Count what was compiled after an earlier time."""
        return Compiled(self.number - earlier.number, self.seconds - earlier.seconds)

    def __str__(self) -> str:
        return f"{self.number} compilation{'' if self.number == 1 else 's'}, {self.seconds:.1f} s"


class Steps:
    """Times the steps of a training, each from one batch to the next, and warns of compilations.

    XLA compiles again for each new shape of a batch, which makes the first steps slow, and some later ones.
    ``compiled`` reads what XLA has compiled so far.
    """

    def __init__(self, compiled: Callable[[], Compiled], clock: Callable[[], float] = time.monotonic) -> None:
        self._compiled, self._clock = compiled, clock
        self._usual: Shapes = ()  # of the first batch
        # Of the present step: its shapes, when it began, and what was compiled before.
        self._present: tuple[Shapes, float, Compiled] | None = None
        self._slow: list[Compiled] = []  # of the first steps, until one compiles nothing
        self._first = self._later = 0.0  # seconds of the first step, and of all that compiled nothing
        self._later_steps = 0
        self._warned: set[Shapes] = set()

    def begins(self, shapes: Sequence[Sequence[int]]) -> None:
        """Begin a step with tensors of these shapes: the step before it has ended."""
        self.ends()
        distinct = tuple(dict.fromkeys(tuple(shape) for shape in shapes))  # in their order, unlike a set
        self._usual = self._usual or distinct
        self._present = distinct, self._clock(), self._compiled()

    def ends(self) -> None:
        """End the present step, if there is one, and count its time.

        At the first step that compiled nothing, report once how much XLA compiled in the steps before it.
        """
        if self._present is None:
            return
        shapes, began_at, compiled_before = self._present
        self._present = None
        seconds = self._clock() - began_at
        compiled = self._compiled().since(compiled_before)
        self._first = self._first or seconds
        if compiled.number:
            self._note_compilation(shapes, compiled)
            return
        if self._slow and not self._later_steps:  # the first step that compiled nothing
            total = Compiled(
                sum(step.number for step in self._slow), sum(step.seconds for step in self._slow)
            )
            count = len(self._slow)
            subject = "the first step was" if count == 1 else f"the first {count} steps were"
            say("start", message=f"{subject} slow: XLA compiled ({total}); a step takes {seconds:.3f} s now")
        self._later_steps += 1
        self._later += seconds

    def metrics(self) -> dict[str, float | int]:
        """Return the metrics of ``report.json``: number and seconds of compilations, and seconds of steps.

        The times of the first step and of steps without a compilation are left out if there was no such step.
        """
        self.ends()
        total = self._compiled()
        values: dict[str, float | int] = {
            "xla_compilations": total.number,
            "xla_compile_seconds": round(total.seconds, 3),
        }
        if self._first:
            values["xla_first_step_seconds"] = round(self._first, 4)
        if self._later_steps:
            values["xla_later_step_seconds"] = round(self._later / self._later_steps, 4)
        return values

    def _note_compilation(self, shapes: Shapes, compiled: Compiled) -> None:
        """Record that a step compiled; warn if its batch has new shapes, at most five times."""
        if not self._later_steps:
            self._slow.append(compiled)
        if shapes == self._usual or shapes in self._warned or len(self._warned) == _MAX_WARNINGS:
            return
        self._warned.add(shapes)
        warn(
            f"a batch of another size made XLA compile again ({compiled}): its tensors are "
            f"{_described(shapes)}, and those of the first batch {_described(self._usual)}. "
            "Give all batches one size, also the evaluation's: drop_last=True for the last one, and padding "
            "to one length"
        )


def _described(shapes: Shapes) -> str:
    return " and ".join("x".join(map(str, shape)) or "a number" for shape in shapes)


class Devices(NamedTuple):
    """The devices of a node, as its process has taken them."""

    number: int
    steps: Steps

    def report(self) -> None:
        """Report the times of compilations and steps as events; metrics.json is for the program's metrics."""
        metrics.report(self.steps.metrics())

    def check(self, program: str) -> None:
        """End the rank with exit code 86 if the program's batches were not divided among the devices."""
        from torch_xla.debug import metrics as counters

        # None: torch_xla has never described how a tensor is divided.
        if self.number == 1 or counters.counter_value("CreateOpSharding"):
            return
        raise NodeExit(
            EXIT_NOT_TOGETHER,
            f"{program} ended without ever dividing a batch among the {self.number} devices that were asked "
            "for. Take batches from a loader that Accelerator.prepare has prepared, or from torch_xla's "
            "MpDeviceLoader.",
        )


def take(requested: int) -> Devices:
    """Take the devices of this node, and have every loader of torch_xla divide its batches among them.

    The rank ends with exit code 88 if there is no torch_xla, and with 87 if the node has another number of
    devices than ``requested``.
    """
    if importlib.util.find_spec("torch_xla") is None:
        raise NodeExit(EXIT_BACKEND, _MISSING)
    from torch_xla import runtime

    runtime.use_spmd()
    count = runtime.global_runtime_device_count()
    if count != requested:
        raise NodeExit(
            EXIT_PROOF,
            f"proof of scale failed: {requested} devices of XLA were asked for (run.nproc_per_node), and "
            f"{runtime.device_type()} has {count}",
        )
    say("start", message=f"XLA has {count} devices of this node, of type {runtime.device_type()}")
    steps = Steps(_read_compiled)
    _wrap_loaders(count, steps)
    if importlib.util.find_spec("accelerate") is not None:
        _wrap_accelerate()
    return Devices(count, steps)


def _read_compiled() -> Compiled:
    """Read what XLA has compiled in this process so far."""
    from torch_xla.debug import metrics as counters

    count, nanoseconds, _ = counters.metric_data("CompileTime") or (0, 0, ())
    return Compiled(int(count), nanoseconds / 1e9)


class _BatchDivision:
    """Tells torch_xla how to divide a batch's tensors among the devices: by their first dimension."""

    minibatch: Final = False  # torch_xla asks: each batch is a whole one, not the part of this process

    def __init__(self, devices: int) -> None:
        import numpy as np
        from torch_xla.distributed import spmd

        self._spmd, self._mesh = spmd, spmd.Mesh(np.arange(devices), (devices,), ("data",))

    def xla_spec(self, tensor: torch.Tensor) -> Any:
        """Return torch_xla's description of how a tensor is divided; None: a number is on every device."""
        if tensor.dim() == 0:
            return None
        placed = ("data", *[None] * (tensor.dim() - 1))  # None: this dimension is not divided
        return self._spmd.ShardingSpec(self._mesh, placed).xla_spec(tensor)


def _wrap_loaders(devices: int, steps: Steps) -> None:
    """Have torch_xla's loaders divide each batch among the devices, and time the steps.

    If Accelerate's ``downcast_bf16`` is asked for, they also send each tensor in a narrower type.
    """
    from torch_xla.distributed import parallel_loader
    from torch_xla.utils.utils import for_each_instance, for_each_instance_rewrite

    loader, device_loader = parallel_loader.ParallelLoader, parallel_loader.PerDeviceLoader
    division = _BatchDivision(devices)
    original_init, original_next = loader.__init__, device_loader.next

    @functools.wraps(original_init)
    def divide(self: Any, *args: Any, **kwargs: Any) -> None:
        """Make a loader that divides its batches; a division that the program asks for stays."""
        kwargs["input_sharding"] = kwargs.get("input_sharding") or division
        original_init(self, *args, **kwargs)

    @functools.wraps(original_next)
    def time_step(self: Any) -> Any:
        """Return the next batch: one step ends before it, and one begins with it."""
        try:
            batch = original_next(self)
        except StopIteration:
            steps.ends()
            raise
        shapes: list[tuple[int, ...]] = []
        for_each_instance(batch, torch.is_tensor, lambda tensor: shapes.append(tuple(tensor.shape)))
        steps.begins(shapes)
        return batch

    original_send = loader.send_cpu_data_to_device

    @functools.wraps(original_send)
    def send_narrowed(self: Any, batches: Any, device: Any) -> Any:
        return original_send(self, for_each_instance_rewrite(batches, torch.is_tensor, _narrowed), device)

    loader.__init__, device_loader.next = divide, time_step
    if _downcasts():
        loader.send_cpu_data_to_device = send_narrowed


def _wrap_accelerate() -> None:
    """Have Accelerate on XLA apply its options ``mixed_precision`` and ``downcast_bf16``.

    torch_xla no longer reads the variables by which Accelerate asks it for bf16 (XLA_USE_BF16,
    XLA_DOWNCAST_BF16).
    """
    from accelerate import Accelerator

    original_init, original_prepare = Accelerator.__init__, Accelerator.prepare_model

    @functools.wraps(original_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        """Make an Accelerator that applies ``mixed_precision``; refuse ``downcast_bf16`` without bf16."""
        original_init(self, *args, **kwargs)
        # native_amp: the forward pass runs under autocast, in bf16. On TPUs Accelerate leaves it off, and
        # instead sets a variable that torch_xla no longer reads.
        self.native_amp = self.native_amp or self.mixed_precision == "bf16"
        if _downcasts() and self.mixed_precision != "bf16":
            raise ValueError(f"downcast_bf16 needs mixed_precision 'bf16', not {self.mixed_precision!r}")

    @functools.wraps(original_prepare)
    def prepare_model(self: Any, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Prepare a model as Accelerate does; with ``downcast_bf16``, narrow its tensors first."""
        if _downcasts():
            for tensor in itertools.chain(model.parameters(), model.buffers()):
                tensor.data = _narrowed(tensor.data)  # in place: the optimizer has these very parameters
        return original_prepare(self, model, *args, **kwargs)

    Accelerator.__init__, Accelerator.prepare_model = init, prepare_model


def _downcasts() -> bool:
    """Whether Accelerate's variable asks for ``downcast_bf16``."""
    return bool(os.environ.get("ACCELERATE_DOWNCAST_BF16"))


def _narrowed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as ``downcast_bf16`` needs it: float as bfloat16, double as float."""
    return tensor.to(_NARROWER_TYPE.get(tensor.dtype, tensor.dtype))
