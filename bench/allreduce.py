"""Allreduce of two ranks on one host: over ccl, over gloo, and beside a copy in memory of as many bytes."""

import json
import sys
from pathlib import Path
from typing import Any

from bench._measure import Turns, agree, by_turns, in_a_row, over_gloo, pids_of_ranks, rounds

RANKS = 2
SIZES = (1 << 10, 64 << 10, 256 << 10, 1 << 20, 25 << 20, 100 << 20)
TARGETS = {
    "float32 1024 KiB: ccl over gloo": 5.0,
    "float32 25600 KiB: ccl over gloo": 3.5,
    "float32 102400 KiB: ccl over gloo": 2.5,
}
WORDS = {
    "title": "Allreduce on one host",
    "meaning": "The sum of gradients, which each step of a training waits for, costs little more over ccl "
    "than reading and writing them once.",
    "figures": {
        r"(\w+) (\d+) KiB: ccl over gloo": (
            r"\2 KiB of \1: ccl is so many times as fast as gloo",
            "x",
            r"at least [target: \1 \2 KiB: ccl over gloo]",
        ),
        r"(\w+) (\d+) KiB: ccl, part of a memory copy's speed": (
            r"\2 KiB of \1: speed of ccl, where a copy in memory is 1",
            "",
            "",
        ),
    },
}


def main() -> dict[str, Any]:
    """Measure; both ranks copy at the same time, as both reduce."""
    return over_gloo(__file__, RANKS) | {"target": TARGETS}


def _rank(out: Path) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group()
    groups = {"ccl": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    pids = pids_of_ranks()
    turns: dict[str, Turns] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for size in SIZES:
            name = f"{str(dtype).removeprefix('torch.')} {size >> 10} KiB"
            turns[name] = _measured(groups, torch.zeros(size // dtype.itemsize, dtype=dtype), pids)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(turns))
    dist.destroy_process_group()


def _measured(groups: dict[str, Any], tensor: Any, pids: list[int]) -> Turns:
    import torch.distributed as dist

    copy = tensor.clone()
    calls = {name: lambda group=group: dist.all_reduce(tensor, group=group) for name, group in groups.items()}
    calls["copy"] = lambda: copy.copy_(tensor)
    repeats = max(4, min(200, (200 << 20) // tensor.nbytes))
    sides = {name: in_a_row(call, repeats, dist.barrier) for name, call in calls.items()}
    by_turns(sides, 1)  # the first allreduces of a size connect, and get memory
    return by_turns(sides, rounds(16, 4), pids, agree)


if __name__ == "__main__":
    _rank(Path(sys.argv[1]))
