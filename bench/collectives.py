"""What sharded training calls, on two ranks of one host: reduce_scatter and all_gather over ccl and gloo."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench._measure import Turns, agree, by_turns, in_a_row, over_gloo, pids_of_ranks, rounds

RANKS = 2
SIZES = (64 << 10, 1 << 20, 25 << 20)  # of the whole tensor: what is scattered, or is gathered
TARGETS = {
    "reduce_scatter float32 25600 KiB: ccl over gloo": 5.0,
    "all_gather float32 25600 KiB: ccl over gloo": 3.0,
}
WORDS = {
    "title": "Sharded training on one host",
    "meaning": "What FSDP waits for, sums of gradients and whole parameters, takes less time than over gloo.",
    "figures": {
        r"(\w+) (\w+) (\d+) KiB: ccl over gloo": (
            r"\1 of \3 KiB of \2: ccl is so many times as fast as gloo",
            "x",
            r"at least [target: \1 \2 \3 KiB: ccl over gloo]",
        ),
        r"(\w+) (\w+) (\d+) KiB: ccl, part of a memory copy's speed": (
            r"\1 of \3 KiB of \2: speed of ccl, where a copy of the whole in memory is 1",
            "",
            "",
        ),
    },
}


def main() -> dict[str, Any]:
    """Measure; both ranks copy at the same time, as both communicate."""
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
            whole = torch.zeros(size // dtype.itemsize, dtype=dtype)
            part = torch.zeros(whole.numel() // RANKS, dtype=dtype)
            for call, sides in _sides(groups, whole, part).items():
                by_turns(sides, 1)  # the first calls of a size connect, and get memory
                name = f"{call} {str(dtype).removeprefix('torch.')} {size >> 10} KiB"
                turns[name] = by_turns(sides, rounds(16, 4), pids, agree)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(turns))
    dist.destroy_process_group()


def _sides(groups: dict[str, Any], whole: Any, part: Any) -> dict[str, dict[str, Callable[[], float]]]:
    """Return what measures each collective over each backend, beside a copy of the whole."""
    import torch.distributed as dist

    copy, repeats = whole.clone(), max(4, min(200, (100 << 20) // whole.nbytes))
    calls: dict[str, Callable[[Any], object]] = {
        "reduce_scatter": lambda group: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_gather": lambda group: dist.all_gather_into_tensor(whole, part, group=group),
    }
    beside = {"copy": in_a_row(lambda: copy.copy_(whole), repeats, dist.barrier)}
    return {
        name: {
            side: in_a_row(lambda call=call, group=group: call(group), repeats, dist.barrier)
            for side, group in groups.items()
        }
        | beside
        for name, call in calls.items()
    }


if __name__ == "__main__":
    _rank(Path(sys.argv[1]))
