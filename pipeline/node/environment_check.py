"""A meeting of all ranks before a training: what Accelerate's debug mode is for."""

import os
from typing import Any

__all__ = ["meet"]


def meet() -> dict[str, Any]:
    """Initialise a process group and add up the ranks' numbers.

    Returns:
        ``world`` (ranks), ``hosts`` (their names) and ``backend``.

    Raises:
        RuntimeError: The sum is wrong: the ranks do not hear each other as they should.
    """
    # Late: the notebook names this function, and needs no torch.
    import torch
    import torch.distributed as dist

    dist.init_process_group()
    numbers = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(numbers)
    world = dist.get_world_size()
    if int(numbers.item()) != world * (world - 1) // 2:
        raise RuntimeError(f"the sum of the numbers of {world} ranks came out as {numbers.item()}")
    hosts: list[Any] = [None] * world
    dist.all_gather_object(hosts, os.environ.get("MANYCPU_HOST", ""))
    backend = dist.get_backend()
    dist.destroy_process_group()
    return {"world": world, "hosts": sorted(set(hosts)), "backend": backend}
