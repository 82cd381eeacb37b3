"""The collective backend ``ccl``: Intel oneCCL for ``torch.distributed`` on CPUs, with current PyTorch.

:func:`register` makes it known to torch, and builds it where it is not built yet; ``python -m
manycpu.pipeline.node.ccl`` builds it ahead, for an image that has no compiler when it runs. With torch 2.8
and earlier Intel's own binding is used, where it is installed.
"""

import atexit
import functools
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from manycpu.pipeline.node.ccl import build, environment, leftovers, peers, vendor

__all__ = ["describe_wait", "register"]

_BUILD: Final = " (built once for each torch and compiler, in half a minute to three minutes)"
"""Measured: 27 s on two idle cores, 140 s on busy ones."""
_MIN_CONNECT_TIMEOUT: Final = timedelta(seconds=30)
"""A group's own timeout is for its collectives and may be shorter; a busy machine connects slowly."""


def describe_wait() -> str:
    """Describe what :func:`register` waits for: the backend, and how long a build takes if it needs one.

    Raises:
        UnavailableError: The backend cannot be used.
    """
    needs_build = vendor.find(torch.__version__) is None and build.is_to_be_built()
    return f"the backend ccl{_BUILD if needs_build else ''}"


@functools.cache
def register() -> None:
    """Make the backend ``ccl`` known to torch, once; build it first where that is needed.

    Raises:
        UnavailableError: The backend cannot be used; the message says why, and what to do.
    """
    binding = vendor.find(torch.__version__)
    if binding is not None:
        vendor.use(binding)
        return
    build.find_library("libfabric.so.1")  # the groups of the backend need it: better to fail now
    module = build.load()
    atexit.register(_end, module)
    dist.Backend.register_backend("ccl", functools.partial(_create_group, module), devices=["cpu"])
    # Have DDP's records name the backend: torch calls each that is not its own "custom".
    original: Callable[[Any], dict[str, Any]] = DistributedDataParallel._get_ddp_logging_data  # noqa: SLF001

    @functools.wraps(original)
    def records(model: Any) -> dict[str, Any]:
        """Return torch's record of a model, with the name of the backend if it is ccl."""
        record = original(model)
        if dist.get_backend(model.process_group) == "ccl":
            record["backend_name"] = "ccl"
        return record

    DistributedDataParallel._get_ddp_logging_data = records  # type: ignore[method-assign] # noqa: SLF001


def _end(module: ModuleType) -> None:
    """Stop the backend when the process ends, and delete the shared memory that is left."""
    module.stop()
    leftovers.release()
    leftovers.sweep()  # of a rank of this run that was killed


def _create_group(module: ModuleType, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Create a process group. torch.distributed calls this on each of the group's ranks.

    ``timeout`` is for the group's collectives. The ranks may take 30 s to connect, even if it is shorter.
    """
    environment.apply()
    connect_timeout = max(timeout, _MIN_CONNECT_TIMEOUT)
    rank_links = peers.connect(store, rank, size, connect_timeout, address=environment.address())
    meeting_store = PrefixStore(rank_links.token, store)  # has no keys of an earlier meeting
    # gloo does what oneCCL lacks.
    gloo = dist.ProcessGroupGloo(PrefixStore("gloo", meeting_store), rank, size, connect_timeout)
    memory = peers.share(meeting_store, rank, size, connect_timeout, part=module.PART)  # None: not shared
    descriptors = [connection.detach() for connection in rank_links.connections]
    leftovers.sweep()  # first: libfabric would reuse shared memory of a dead process that had this id
    try:
        return module.create(
            meeting_store, rank, size, timeout, connect_timeout, descriptors, rank_links.names, memory, gloo
        )
    finally:
        leftovers.claim()  # the shared memory that libfabric has made, perhaps also where it failed
