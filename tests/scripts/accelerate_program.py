"""What programs do with Accelerate. Each rank leaves what it saw in a folder: rank-0.json and so on."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

folder = Path(sys.argv[1])
accelerator = Accelerator()
set_seed(7)
model, data = torch.nn.Linear(1, 1), [torch.tensor([float(each)]) for each in range(5)]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2))
metrics = []
for batch in loader:
    with accelerator.accumulate(model):
        out = model(batch)
        accelerator.backward(out.float().sum())
        optimizer.step()
        optimizer.zero_grad()
    metrics.append(accelerator.gather_for_metrics(batch))
weight = accelerator.unwrap_model(model).weight
trained = weight.item()
accelerator.save_state(str(folder / "state"))
accelerator.wait_for_everyone()  # rank 0 writes what all read
with torch.no_grad():
    weight.zero_()
accelerator.load_state(str(folder / "state"))
everyones = accelerator.gather(torch.tensor([trained, float(accelerator.process_index)], dtype=torch.float64))
accelerator.print("said by one")
seen = {
    "distributed_type": accelerator.distributed_type.value,
    "process_index": accelerator.process_index,
    "num_processes": accelerator.num_processes,
    "mixed_precision": accelerator.mixed_precision,
    "computed_in": str(torch.get_autocast_dtype("cpu")) if accelerator.native_amp else None,
    "backend": torch.distributed.get_backend(),
    "trained": trained,
    "loaded": weight.item(),
    "gathered": everyones.tolist(),
    "metrics": sorted(torch.cat(metrics).flatten().tolist()),
    "argv": sys.argv[2:],
}
(folder / f"rank-{accelerator.process_index}.json").write_text(json.dumps(seen))
