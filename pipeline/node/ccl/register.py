"""Make ``ccl`` known to torch.distributed."""

import atexit
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from manycpu.pipeline.node.ccl import build, environment, leftovers, memory, peers, vendor

__all__ = ["register"]


@cache
def register() -> None:
    """Register the backend, once.

    Raises:
        UnavailableError: It cannot be had, with the reason and what to do.
    """
    binding = vendor.find(torch.__version__)
    if binding is not None:
        vendor.use(binding)
        return
    module = build.load()
    leftovers.sweep()
    atexit.register(_end, module)
    dist.Backend.register_backend("ccl", _creator(module), devices=["cpu"])


def _end(module: ModuleType) -> None:
    module.stop()
    leftovers.sweep(mine=True)


def _creator(module: ModuleType) -> Callable[..., Any]:
    def create(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
        """Make a group, as torch.distributed asks for one; all ranks of it do."""
        environment.apply()
        met = peers.connect(store, rank, size, timeout, environment.address())
        own = PrefixStore(met.token, store)  # nothing that an earlier meeting left in it
        messages = None
        if size > 1:
            messages = dist.ProcessGroupGloo(PrefixStore("messages", own), rank, size, timeout)
        shared = memory.share(own, rank, size, timeout, module.PART)
        descriptors = [connection.detach() for connection in met.connections]
        return module.create(own, rank, size, timeout, descriptors, met.names, shared, messages)

    return create
