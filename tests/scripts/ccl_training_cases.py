"""Trainings over a group of ccl, as those of ccl_cases."""

import ccl_train
import torch
import torch.distributed as dist
from ccl_cases import start
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


def trains() -> dict[str, list[list[float]]]:
    """Train in each way, on ccl and on gloo."""
    start()
    return ccl_train.on_both()


def hybrid() -> dict[str, object]:
    """Shard within pairs and replicate between them, beside plain data parallelism."""
    start()
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found = {"ddp": ccl_train.ddp(dist.group.WORLD), **ccl_train.hybrid(mesh)}
    dist.destroy_process_group()
    return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def unlike(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], allowed: float) -> list[str]:
    """Name the tensors that differ by more than a part of their greatest element."""
    assert found.keys() == expected.keys()
    differences = {name: (found[name] - value).abs().max() for name, value in expected.items()}
    return [
        f"{name}: {difference}"
        for name, difference in differences.items()
        if not difference <= allowed * expected[name].abs().max()
    ]


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(one.grad).float() for name, one in model.named_parameters()}


def sharded() -> dict[str, object]:
    """Shard with FSDP2, in odd shards, as a model of one process has its gradients; also in bf16."""
    rank, size = start()
    inputs = torch.randn(4 * size, 16, generator=torch.Generator().manual_seed(1))
    alone = ccl_train.model()
    alone(inputs).square().mean().backward()
    expected = gradients(alone)
    policies = {
        torch.float32: (MixedPrecisionPolicy(), 1e-5),
        torch.bfloat16: (MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16), 0.05),
    }
    groups = {"ccl": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    found: dict[str, dict[str, list[str]]] = {name: {} for name in groups}
    for name, group in groups.items():
        mesh = dist.DeviceMesh.from_group(group, "cpu")
        for dtype, (policy, allowed) in policies.items():
            if (name, dtype) == ("gloo", torch.bfloat16):
                continue  # it adds in bf16
            model = ccl_train.model()
            for part in (*(layer for layer in model if isinstance(layer, nn.Linear)), model):
                fully_shard(part, mesh=mesh, mp_policy=policy)
            model(inputs[4 * rank : 4 * rank + 4]).float().square().mean().backward()
            found[name][str(dtype).removeprefix("torch.")] = unlike(gradients(model), expected, allowed)
    return {**found, "compared": len(expected)}


class Block(nn.Module):
    """What tensor parallelism splits: a norm along the sequence, and two layers between which features are split."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 36), nn.Linear(36, 16)
        self.end, self.head = nn.LayerNorm(16), nn.Linear(16, 12, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.end(x + self.down(nn.functional.gelu(self.up(self.norm(x))))))


PLAN = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    "end": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def seen(model: nn.Module, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Compute an output and all gradients."""
    output = model(inputs)
    output.square().mean().backward()
    assert inputs.grad is not None
    return gradients(model) | {"output": whole(output.detach()), "input": whole(inputs.grad)}


def tensor_parallel() -> dict[str, object]:
    """Split the layers and the sequence among all ranks."""
    _, size = start()
    mesh = dist.init_device_mesh("cpu", (size,), mesh_dim_names=("model",))
    inputs = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(1))
    expected = seen(Block(), inputs.clone().requires_grad_())
    model = parallelize_module(Block(), mesh, PLAN)
    spread = distribute_tensor(inputs, mesh, [Shard(1)]).requires_grad_()
    found = {"wrong": unlike(seen(model, spread), expected, 1e-5), "compared": len(expected)}
    backend = dist.get_backend(mesh.get_group())
    dist.destroy_process_group()
    return found | {"backend": backend}


def tensor_and_data_parallel() -> dict[str, object]:
    """Split layers within pairs of ranks, and shard what is left of them with FSDP2 between the pairs."""
    rank, size = start()
    mesh = dist.init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "model"))
    pairs = size // 2
    inputs = torch.randn(2 * pairs, 8, 16, generator=torch.Generator().manual_seed(1))
    expected = seen(Block(), inputs.clone().requires_grad_())
    own = slice(2 * (rank // 2), 2 * (rank // 2) + 2)
    expected["output"], expected["input"] = expected["output"][own], expected["input"][own] * pairs
    model = parallelize_module(Block(), mesh["model"], PLAN)
    fully_shard(model, mesh=mesh["data"])
    spread = distribute_tensor(inputs[own], mesh["model"], [Shard(1)]).requires_grad_()
    found = {"wrong": unlike(seen(model, spread), expected, 1e-5), "compared": len(expected)}
    backend = dist.get_backend(mesh["model"].get_group())
    dist.destroy_process_group()
    return found | {"backend": backend}
