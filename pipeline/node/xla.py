"""Devices of XLA: one process drives all of its node's, and each batch is divided among them (SPMD).

The program is one that trains by Accelerate, or takes its batches from torch_xla's loaders. Its batch size is
that of all devices together, and its loss that of one device.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

from manycpu.pipeline.node import metrics, xla_accelerate
from manycpu.pipeline.node.emit import say
from manycpu.pipeline.node.node_exit import BACKEND, NEVER_INITIALISED, PROOF, NodeExit
from manycpu.pipeline.node.xla_steps import Compiled, Steps

__all__ = ["Devices", "take"]

_MISSING: Final = (
    "run.device: 'xla' cannot be had: this environment has no torch_xla. Install requirements/xla-torch.txt "
    "and requirements/xla.txt, and on TPUs 'torch_xla[tpu]' of the same version: docs/xla.md"
)


class Devices(NamedTuple):
    """The devices of a node, as its process has taken them."""

    number: int
    steps: Steps

    def report(self) -> None:
        """Report the times of compilations and of steps."""
        metrics.metrics(self.steps.metrics())

    def check(self, program: str) -> None:
        """See that the program had its batches divided among the devices.

        Raises:
            NodeExit: 86, each device did all of the work.
        """
        from torch_xla.debug import metrics as seen

        if self.number == 1 or seen.counter_value("CreateOpSharding"):
            return
        raise NodeExit(
            NEVER_INITIALISED,
            f"{program} ended without ever dividing a batch among the {self.number} devices that were asked "
            "for. Take batches from a loader that Accelerator.prepare has prepared, or from torch_xla's "
            "MpDeviceLoader.",
        )


def take(asked_for: int) -> Devices:
    """Take the devices of this node, and have every loader of torch_xla divide its batches among them.

    Raises:
        NodeExit: 88, there is no torch_xla; 87, there is another number of devices.
    """
    if importlib.util.find_spec("torch_xla") is None:
        raise NodeExit(BACKEND, _MISSING)
    from torch_xla import runtime

    runtime.use_spmd()
    count = runtime.global_runtime_device_count()
    if count != asked_for:
        raise NodeExit(
            PROOF,
            f"proof of scale failed: {asked_for} devices of XLA were asked for (run.nproc_per_node), and "
            f"{runtime.device_type()} has {count}",
        )
    say("start", message=f"XLA has {count} devices of this node, of type {runtime.device_type()}")
    steps = Steps(_compiled)
    _wrap_loaders(count, steps)
    xla_accelerate.wrap()
    return Devices(count, steps)


def _compiled() -> Compiled:
    from torch_xla.debug import metrics as seen

    count, nanoseconds, _ = seen.metric_data("CompileTime") or (0, 0, ())
    return Compiled(int(count), nanoseconds / 1e9)


class _Divided:
    """Where a batch's tensors lie, as torch_xla asks for it: divided by their first dimension."""

    minibatch: Final = False

    def __init__(self, devices: int) -> None:
        import numpy as np
        from torch_xla.distributed import spmd

        self._spmd, self._mesh = spmd, spmd.Mesh(np.arange(devices), (devices,), ("data",))

    def xla_spec(self, tensor: torch.Tensor) -> Any:
        """Describe where a tensor lies; a number is on every device."""
        if tensor.dim() == 0:
            return None
        placed = ("data", *[None] * (tensor.dim() - 1))
        return self._spmd.ShardingSpec(self._mesh, placed).xla_spec(tensor)


def _wrap_loaders(devices: int, steps: Steps) -> None:
    from torch_xla.distributed import parallel_loader

    loader, of_device = parallel_loader.ParallelLoader, parallel_loader.PerDeviceLoader
    loader.__init__ = _dividing(loader.__init__, _Divided(devices))
    of_device.next = _timed(of_device.next, steps)
    if xla_accelerate.downcasts():
        loader.send_cpu_data_to_device = _downcasting(loader.send_cpu_data_to_device)


def _dividing(original: Callable[..., None], divided: _Divided) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["input_sharding"] = kwargs.get("input_sharding") or divided
        original(self, *args, **kwargs)

    return init


def _timed(original: Callable[..., Any], steps: Steps) -> Callable[..., Any]:
    from torch_xla.utils.utils import for_each_instance

    @functools.wraps(original)
    def following(self: Any) -> Any:
        try:
            batch = original(self)
        except StopIteration:
            steps.ends()
            raise
        shapes: list[tuple[int, ...]] = []
        for_each_instance(batch, torch.is_tensor, lambda tensor: shapes.append(tuple(tensor.shape)))
        steps.begins(shapes)
        return batch

    return following


def _downcasting(original: Callable[..., Any]) -> Callable[..., Any]:
    from torch_xla.utils.utils import for_each_instance_rewrite

    @functools.wraps(original)
    def send(self: Any, batches: Any, device: Any) -> Any:
        narrow = for_each_instance_rewrite(batches, torch.is_tensor, xla_accelerate.narrowed)
        return original(self, narrow, device)

    return send
