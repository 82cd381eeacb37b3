"""Trainings over a group of ccl, as those of ccl_cases."""

import ccl_train
import torch.distributed as dist
from ccl_cases import start


def trains() -> dict[str, list[list[float]]]:
    """Train in each way, on ccl and on gloo."""
    start()
    found = ccl_train.on_both()
    dist.destroy_process_group()
    return found


def hybrid() -> dict[str, object]:
    """Shard within pairs and replicate between them, beside plain data parallelism."""
    start()
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found = {"ddp": ccl_train.ddp(dist.group.WORLD), **ccl_train.hybrid(mesh)}
    dist.destroy_process_group()
    return found
