"""Allreduce of ccl beside gloo's: two ranks, alternating in one run, medians; and the memory's own limit."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 7
SIZES = (1 << 10, 64 << 10, 1 << 20, 25 << 20, 100 << 20)


def main() -> dict[str, object]:
    """Run it under torchrun; for each dtype and size how many times as fast ccl is."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "figures.json")
        rank = [sys.executable, "-m", "manycpu.pipeline.node", __file__, str(out)]
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        subprocess.run(
            [*launch, "--no-python", *rank], check=True, env=os.environ | {"MANYCPU_BACKEND": "ccl"}
        )
        found: dict[str, object] = json.loads(out.read_text())
    return found


def _rank(out: Path) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group()
    groups = {"ccl": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    figures: dict[str, object] = {"loadavg": os.getloadavg()[0]}
    for dtype in (torch.float32, torch.bfloat16):
        for size in SIZES:
            tensor = torch.zeros(size // dtype.itemsize, dtype=dtype)
            medians = _medians(groups, tensor)
            name = f"{str(dtype).removeprefix('torch.')} {size >> 10} KiB"
            figures[f"{name}: ccl over gloo"] = round(medians["gloo"] / medians["ccl"], 2)
            figures[f"{name}: ccl, part of a memory copy's speed"] = round(_copy(tensor) / medians["ccl"], 3)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(figures))
    dist.destroy_process_group()


def _medians(groups: dict[str, object], tensor: object) -> dict[str, float]:
    import torch.distributed as dist

    times: dict[str, list[float]] = {name: [] for name in groups}
    repeats = max(2, min(200, (8 << 20) // max(1, tensor.nbytes)))  # type: ignore[attr-defined]
    for _ in range(ROUNDS):
        for name, group in groups.items():
            dist.barrier(group=group)  # type: ignore[arg-type]
            begun = time.perf_counter()
            for _ in range(repeats):
                dist.all_reduce(tensor, group=group)  # type: ignore[arg-type]
            times[name].append((time.perf_counter() - begun) / repeats)
    return {name: statistics.median(seen) for name, seen in times.items()}


def _copy(tensor: object) -> float:
    """Time a copy of as many bytes."""
    target = tensor.clone()  # type: ignore[attr-defined]
    times = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        target.copy_(tensor)
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


if __name__ == "__main__":
    _rank(Path(sys.argv[1]))
