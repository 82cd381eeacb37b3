"""Train by Accelerate, from a checkpoint that it wrote; each rank leaves what it saw: rank-0.json and so on."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed


class Block(torch.nn.Module):
    """A part that FSDP gathers at once."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x).relu()


class Blocks(torch.nn.Sequential):
    """A model that names its blocks as those of transformers do."""

    _no_split_modules = ("Block",)


folder = Path(sys.argv[1])
accelerator = Accelerator()
set_seed(7)
model = Blocks(Block(), Block(), torch.nn.Linear(8, 1))
data = torch.utils.data.DataLoader(torch.rand(16, 8), batch_size=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, data)
norms = []
for epoch in range(3):
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        # Accelerate before 1.14 returns the ranks' shares of it.
        norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        optimizer.step()
        optimizer.zero_grad()
    if epoch == 0:
        accelerator.save_state(str(folder / "state"))
    if epoch == 1:  # the last epoch repeats the second
        accelerator.load_state(str(folder / "state"))
held = sum(
    each.to_local().numel() if hasattr(each, "to_local") else each.numel() for each in model.parameters()
)
whole = accelerator.get_state_dict(model)
seen = {
    "type": accelerator.distributed_type.value,
    "held": held,
    "norms": norms,
    "weights": {name: value.flatten().tolist() for name, value in whole.items()},
}
(folder / f"rank-{accelerator.process_index}.json").write_text(json.dumps(seen))
accelerator.end_training()
