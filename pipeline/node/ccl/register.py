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

__all__ = ["awaited", "register"]

_BUILD = " (built once for each torch and compiler, in half a minute to three minutes)"
"""Measured: 27 s on two quiet cores, 140 s on busy ones."""
_MEETING = timedelta(seconds=30)
"""At least, to meet: a group's own timeout is for its collectives, and a busy machine connects slowly."""


def awaited() -> str:
    """Name what :func:`register` waits for, with the time of a build where there is none yet.

    Raises:
        UnavailableError: It cannot be had.
    """
    needs_build = vendor.find(torch.__version__) is None and build.is_to_be_built()
    return f"the backend ccl{_BUILD if needs_build else ''}"


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
    atexit.register(_end, module)
    dist.Backend.register_backend("ccl", _creator(module), devices=["cpu"])
    DistributedDataParallel._get_ddp_logging_data = _named(DistributedDataParallel._get_ddp_logging_data)  # type: ignore[method-assign] # noqa: SLF001


def _end(module: ModuleType) -> None:
    module.stop()
    leftovers.release()
    leftovers.sweep()  # of a rank of this run that was killed


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
        leftovers.sweep()  # first: libfabric would take one of a dead process with this one's number
        try:
            return module.create(own, rank, size, timeout, patience, descriptors, met.names, shared, gloo)
        finally:
            leftovers.claim()

    return create
