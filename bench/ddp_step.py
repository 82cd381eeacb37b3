"""A training step of BERT (67M) in bf16 on two ranks: over ccl, over gloo, and with no communication."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench._measure import agree, by_turns, in_ranks, pids_of_ranks, ratio, rounds, spread

RANKS = 2
TARGETS = {"ccl over gloo": 1.05, "no communication over ccl": 1.2}
WORDS = {
    "title": "A training step of two processes",
    "meaning": "A data-parallel training over ccl is nearly as fast as if its processes did not "
    "communicate at all.",
    "figures": {
        "rates: no communication": (
            "Speed of both processes without any communication: the bound",
            "samples/s",
            "",
        ),
        r"rates: (ccl|gloo)": (r"Speed over \1", "samples/s", ""),
        r"rates: (ccl|gloo) compressed": (r"Speed over \1 with gradients sent as bf16", "samples/s", ""),
        "ratios: ccl over gloo": (
            "A step over ccl is so many times as fast as over gloo",
            "x",
            "at least [target: ccl over gloo]",
        ),
        "ratios: no communication over ccl": (
            "A step without communication is so many times as fast as over ccl",
            "x",
            "at most [target: no communication over ccl]",
        ),
        "ratios: no communication over gloo": (
            "A step without communication is so many times as fast as over gloo",
            "x",
            "",
        ),
        r"ratios: (ccl|gloo) compressed over \w+": (
            r"Sending gradients as bf16 over \1 makes a step so many times as fast",
            "x",
            "",
        ),
    },
}


def main() -> dict[str, Any]:
    """Measure; the bound is the same step on both ranks, with gradients that stay where they are."""
    measured = in_ranks(__file__, RANKS, MANYCPU_BACKEND="ccl", MANYCPU_DTYPE="bf16")
    times, samples = measured["times"], measured["samples"]
    return {
        "unit": "samples/s",
        "rates": {name: spread([samples / value for value in side]) for name, side in times.items()},
        "ratios": {
            "ccl over gloo": ratio(times["gloo"], times["ccl"]),
            "no communication over ccl": ratio(times["ccl"], times["no communication"]),
            "no communication over gloo": ratio(times["gloo"], times["no communication"]),
            **{
                f"{name} over {name.partition(' ')[0]}": ratio(times[name.partition(" ")[0]], times[name])
                for name in times
                if "compressed" in name
            },
        },
        "others' part of the cores": measured["others"],
        "target": TARGETS,
    }


def _rank(out: Path) -> None:
    import torch.distributed as dist

    from bench import _bert

    dist.init_process_group()
    groups = {"ccl": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    sides = {name: _side(group) for name, group in groups.items()}
    sides["no communication"] = _side(groups["gloo"], talks=False)
    if not rounds(0, 1):
        sides |= {f"{name} compressed": _side(group, compressed=True) for name, group in groups.items()}
    pids = pids_of_ranks()
    by_turns(sides, 1)
    times, others = by_turns(sides, rounds(24, 6), pids, agree)
    if dist.get_rank() == 0:
        figures = {"samples": RANKS * _bert.BATCH, "times": times, "others": others}
        out.write_text(json.dumps(figures))
    dist.destroy_process_group()


def _side(group: Any, *, talks: bool = True, compressed: bool = False) -> Callable[[], float]:
    import contextlib

    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    from bench import _bert

    model = torch.nn.parallel.DistributedDataParallel(
        _bert.model(), process_group=group, gradient_as_bucket_view=True
    )
    if compressed:
        model.register_comm_hook(group, bf16_compress_hook)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
    step = _bert.stepper(model, optimizer, _bert.batch(), bf16=True)

    def measure() -> float:
        dist.barrier()
        began = time.perf_counter()
        step(contextlib.nullcontext if talks else model.no_sync)
        dist.barrier()  # both ranks have done their step
        return time.perf_counter() - began

    return measure


if __name__ == "__main__":
    _rank(Path(sys.argv[1]))
