"""What the node asks of torch.distributed, and a process group that does nothing."""

from torch.distributed.distributed_c10d import (
    all_reduce,
    destroy_process_group,
    get_rank,
    get_world_size,
    init_process_group,
    is_initialized,
)
from torch.distributed.store import DistError, PrefixStore, Store, TCPStore

__all__ = [
    "DistError",
    "PrefixStore",
    "Store",
    "TCPStore",
    "all_reduce",
    "destroy_process_group",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
]


def is_gloo_available():
    return True


def is_mpi_available():
    return False
