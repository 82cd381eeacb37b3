"""Allreduce of fp32 between two pods on two nodes of the test cluster: over ccl, and over gloo."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench._measure import agree, by_turns, in_a_row, ratio, rounds, spread

SIZES = {"1 KiB": 1 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "25 MiB": 25 << 20}
TARGETS = {"1 KiB": 8, "1 MiB": 1.6, "25 MiB": 1}
IN_ONE_TURN = 8 << 20  # bytes, and at least two calls, at most 200
FILES = ("pods.py", "_measure.py")
WORDS = {
    "title": "Allreduce between two pods",
    "meaning": "Over a network, too, ccl is faster than gloo: most of all for small messages.",
    "figures": {
        r"([\d.]+ \w+): (ccl|gloo)": (r"\1 over \2", "µs", ""),
        r"ccl over gloo: (.+)": (
            r"\1: ccl is so many times as fast as gloo",
            "x",
            r"at least [target: \1]",
        ),
    },
}


def main() -> dict[str, Any]:
    """Measure; sides take turns within one run of two pods with a core each."""
    from bench._cluster import namespace

    with namespace("bench-pods") as (_, space), TemporaryDirectory() as folder:
        return figures(space, Path(folder))


def figures(space: Any, folder: Path) -> dict[str, Any]:
    """Run the ranks in a namespace of the test cluster, and summarise their times."""
    times = _times(space, folder)
    micro = {
        size: {name: spread([1e6 * value for value in values]) for name, values in sides.items()}
        for size, sides in times.items()
    }
    return {
        "unit": "microseconds for one allreduce",
        **micro,
        "ccl over gloo": {size: ratio(sides["gloo"], sides["ccl"]) for size, sides in times.items()},
        "target": TARGETS,
    }


def _times(space: Any, folder: Path) -> dict[str, dict[str, list[float]]]:
    from bench._cluster import target
    from manycpu.pipeline import train

    (folder / "bench").mkdir()
    for name in FILES:
        shutil.copy(Path(__file__).with_name(name), folder / "bench")
    run = {
        "program": "-m bench.pods",
        "args": ["{output}/figures.json"],
        "output": str(folder / "out"),
        "backend": "ccl",
        "nnodes": 2,
        "spread": "require",
        "resources": {"cpu": 1, "memory": "2Gi"},
        "env": {name: value for name, value in os.environ.items() if name.startswith("MANYCPU_BENCH")},
    }
    train(run, target(space, claim_size="1Gi"), base=folder)
    times: dict[str, dict[str, list[float]]] = json.loads((folder / "out" / "figures.json").read_text())
    return times


def _rank(out: Path) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group()
    groups = {"ccl": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    times = {}
    for size, count in SIZES.items():
        tensor = torch.zeros(count // torch.float32.itemsize)
        sides = {name: _side(tensor, group) for name, group in groups.items()}
        by_turns(sides, 1)
        times[size] = by_turns(sides, rounds(24, 6), agreed=agree).times
    if dist.get_rank() == 0:
        out.write_text(json.dumps(times))
    dist.destroy_process_group()


def _side(tensor: Any, group: Any) -> Callable[[], float]:
    import torch.distributed as dist

    repeats = max(2, min(200, IN_ONE_TURN // tensor.nbytes))
    reduce = partial(dist.all_reduce, tensor, group=group)
    return in_a_row(reduce, repeats, partial(dist.barrier, group=group))


if __name__ == "__main__":
    _rank(Path(sys.argv[1]))
