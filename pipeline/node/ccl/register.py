"""Make ``ccl`` known to torch.distributed."""

import atexit
import functools
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from manycpu.pipeline.node.ccl import build, environment, leftovers, memory, peers, toolchain, vendor

__all__ = ["register"]

_MEETING = timedelta(seconds=30)
"""At least, to meet: a group's own timeout is for its collectives, and a busy machine connects slowly."""


@functools.cache
def register() -> None:
    """Register the backend, once.

    Raises:
        UnavailableError: It cannot be had, with the reason and what to do.
    """
    binding = vendor.find(torch.__version__)
    if binding is not None:
        vendor.use(binding)
        return
    toolchain.library("libfabric.so.1")  # which its groups need: better to know now
    module = build.load()
    leftovers.sweep()
    atexit.register(_end, module)
    dist.Backend.register_backend("ccl", _creator(module), devices=["cpu"])
    DistributedDataParallel._get_ddp_logging_data = _named(DistributedDataParallel._get_ddp_logging_data)  # type: ignore[method-assign] # noqa: SLF001


def _end(module: ModuleType) -> None:
    module.stop()
    leftovers.sweep(mine=True)


def _named(original: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """Have DDP's own records name the backend: torch calls each that is not its own ``custom``."""

    @functools.wraps(original)
    def records(model: Any) -> dict[str, Any]:
        record = original(model)
        return record | ({"backend_name": "ccl"} if dist.get_backend(model.process_group) == "ccl" else {})

    return records


def _creator(module: ModuleType) -> Callable[..., Any]:
    def create(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
        """Make a group, as torch.distributed asks for one; all ranks of it do."""
        environment.apply()
        patience = max(timeout, _MEETING)
        met = peers.connect(store, rank, size, patience, environment.address())
        own = PrefixStore(met.token, store)  # nothing that an earlier meeting left in it
        gloo = dist.ProcessGroupGloo(
            PrefixStore("gloo", own), rank, size, patience
        )  # for what oneCCL has not
        shared = memory.share(own, rank, size, patience, module.PART)
        descriptors = [connection.detach() for connection in met.connections]
        return module.create(own, rank, size, timeout, patience, descriptors, met.names, shared, gloo)

    return create
