"""A gloo all-reduce by all ranks, which torch's launcher or Intel MPI's has started."""

import os
import socket

import torch
import torch.distributed as dist

if "PMI_RANK" in os.environ:
    os.environ |= {"RANK": os.environ["PMI_RANK"], "WORLD_SIZE": os.environ["PMI_SIZE"]}
dist.init_process_group("gloo")
tensor = torch.full((1000,), dist.get_rank() + 1.0)
dist.all_reduce(tensor)
print(f"rank {dist.get_rank()} of {dist.get_world_size()} on {socket.gethostname()}: {tensor[0].item():.0f}")  # noqa: T201
dist.destroy_process_group()
