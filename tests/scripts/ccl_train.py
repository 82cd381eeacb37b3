"""Unmodified training in three ways, on ccl and then on gloo: the losses of every step, for comparison.

``ccl_train.py FOLDER``. Nothing in here knows of manycpu, except that it asks torch which backend it has.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel

STEPS = 4
Step = Callable[[torch.Tensor, torch.Tensor], float]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.LayerNorm(33), nn.Linear(33, 3))


def losses(wrapped: nn.Module) -> list[float]:
    """Train some steps on this rank's share of the data."""
    optimizer = torch.optim.AdamW(wrapped.parameters(), 1e-2)
    made = torch.Generator().manual_seed(dist.get_rank())
    found = []
    for _ in range(STEPS):
        x, y = torch.randn(8, 16, generator=made), torch.randint(0, 3, (8,), generator=made)
        loss = nn.functional.cross_entropy(wrapped(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss))
    return found


def ddp(group: dist.ProcessGroup) -> list[float]:
    return losses(DistributedDataParallel(model(), process_group=group, bucket_cap_mb=1e-3))


def fsdp(group: dist.ProcessGroup) -> list[float]:
    return losses(FullyShardedDataParallel(model(), process_group=group, device_id=torch.device("cpu")))


def fsdp2(group: dist.ProcessGroup) -> list[float]:
    mesh = dist.DeviceMesh.from_group(group, "cpu")
    sharded = model()
    fully_shard(sharded, mesh=mesh)
    return losses(sharded)


def hybrid(mesh: dist.DeviceMesh) -> dict[str, list[float]]:
    strategy, cpu = ShardingStrategy.HYBRID_SHARD, torch.device("cpu")
    first = FullyShardedDataParallel(model(), device_mesh=mesh, sharding_strategy=strategy, device_id=cpu)
    second = model()
    fully_shard(second, mesh=mesh)
    return {"fsdp": losses(first), "fsdp2": losses(second)}


def on_both() -> dict[str, list[list[float]]]:
    """Train in each way on the world's backend, and on gloo."""
    world, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    assert world is not None
    assert gloo is not None
    return {way.__name__: [way(world), way(gloo)] for way in (ddp, fsdp, fsdp2)}


def main() -> None:
    dist.init_process_group()
    result = {"backend": dist.get_backend(), **on_both()}
    (Path(sys.argv[1]) / f"rank{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
