"""Train a small model in shares, beside a replica of it that sees all samples; report how far they are apart."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from manycpu.pipeline.node import sharding
from manycpu.pipeline.node.metrics import metrics


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.attention = torch.nn.MultiheadAttention(width, 2, batch_first=True)
        self.wide = torch.nn.Linear(width, 3 * width)
        self.back = torch.nn.Linear(3 * width, width)

    def forward(self, x):
        normed = self.norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.back(torch.nn.functional.gelu(self.wide(x)))


class Model(torch.nn.Module):
    def __init__(self, width=30):  # no multiple of four ranks
        super().__init__()
        self.embedding = torch.nn.Embedding(101, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(3))
        self.head = torch.nn.Linear(width, 101, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return torch.nn.functional.cross_entropy(self.head(x * self.scale).flatten(0, 1), ids.flatten())


def model():
    torch.manual_seed(1)
    return Model()


dist.init_process_group()
rank, ranks, output = dist.get_rank(), dist.get_world_size(), Path(sys.argv[1])
ids = torch.randint(101, (8, 12), generator=torch.Generator().manual_seed(2))
found = {"gradients": 0.0, "norm": 0.0, "parameters": 0.0}
for mode in ("full", "hybrid"):
    for again in (False, True):
        replica = model()
        shares = sharding.shard(model(), blocks=[Block], mode=mode, checkpoint_activations=again)
        # SGD: AdamW's first steps are signs of the gradients, which noise decides where they are nearly zero.
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (replica, shares)]
        for _ in range(3):
            replica(ids).backward()
            shares(ids[rank::ranks]).backward()
            pairs = zip(shares.parameters(), replica.parameters(), strict=True)
            for share, whole in pairs:
                apart = float((share.grad.full_tensor() - whole.grad).abs().max())
                found["gradients"] = max(found["gradients"], apart)
            norm = float(torch.nn.utils.clip_grad_norm_(replica.parameters(), 0.5))
            found["norm"] = max(found["norm"], abs(sharding.clip_gradients(shares, 0.5) - norm))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for share, whole in zip(shares.parameters(), replica.parameters(), strict=True):
            apart = float((share.full_tensor() - whole).detach().abs().max())
            found["parameters"] = max(found["parameters"], apart)
found["share"] = sum(p.to_local().numel() for p in shares.parameters()) / sum(
    p.numel() for p in replica.parameters()
)

folder = Path(os.environ["MANYCPU_CHECKPOINTS"]) / "step-3"
sharding.save(folder, shares, optimizers[1], step=3)
fresh = sharding.shard(model(), blocks=[Block])
optimizer = torch.optim.SGD(fresh.parameters(), lr=0.1, momentum=0.9)
found["step"] = sharding.load(folder, fresh, optimizer)["step"]
states = [
    [s["momentum_buffer"].full_tensor() for s in one.state.values()] for one in (optimizer, optimizers[1])
]
found["resumed"] = float(all(torch.equal(a, b) for a, b in zip(*states, strict=True)))

sharding._MAX_FILE_BYTES = 40_000
sharding.export(fresh, output)
if rank == 0:
    torch.save(replica.state_dict(), output / "replica.pt")
in_bf16 = sharding.shard(model(), blocks=[Block], dtype=torch.bfloat16)
loss = in_bf16(ids[rank::ranks])
loss.backward()
found["bf16_gradients_are_fp32"] = float(all(p.grad.dtype == torch.float32 for p in in_bf16.parameters()))
metrics(found)
