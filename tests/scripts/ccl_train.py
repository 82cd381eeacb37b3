"""Unmodified training in four ways, on ccl and then on gloo: the losses of every step, for comparison.

``ccl_train.py FOLDER [torch]``, where ``torch`` leaves out what is Hugging Face's. Nothing in here knows of
manycpu, except that it asks torch which backend it has.
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


def accelerate() -> list[float]:
    """Train with Accelerate on the default group, and gather as its users do for metrics."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    assert accelerator.num_processes == dist.get_world_size()
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net, optimizer = accelerator.prepare(net, optimizer)
    made = torch.Generator().manual_seed(accelerator.process_index)
    found = []
    for _ in range(STEPS):
        x, y = torch.randn(8, 16, generator=made), torch.randint(0, 3, (8,), generator=made)
        loss = nn.functional.cross_entropy(net(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(accelerator.gather(loss.detach()).mean()))
    return found


def trainer(folder: Path) -> list[float]:
    """Train a tiny random BERT with the Hugging Face Trainer."""
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

    set_seed(0)
    config = BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    made = torch.Generator().manual_seed(0)
    rows = [
        {"input_ids": torch.randint(0, 40, (8,), generator=made), "labels": torch.tensor(k % 2)}
        for k in range(16)
    ]
    options = TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=2,
        logging_steps=1,
        max_steps=STEPS,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    assert options.world_size == dist.get_world_size()
    made_trainer = Trainer(model=BertForSequenceClassification(config), args=options, train_dataset=rows)
    made_trainer.train()
    return [float(entry["loss"]) for entry in made_trainer.state.log_history if "loss" in entry]


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group()
    world, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    assert world is not None
    assert gloo is not None
    result: dict[str, object] = {"backend": dist.get_backend()}
    for way in (ddp, fsdp, fsdp2):
        result[way.__name__] = [way(world), way(gloo)]
    if "torch" not in sys.argv[2:]:
        result["accelerate"] = accelerate()
        result["trainer"] = trainer(folder)
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
