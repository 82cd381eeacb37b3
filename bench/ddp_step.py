"""A training step of BERT (67M) in bf16 on two ranks: over ccl, over gloo, and with no communication."""

import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench._measure import agree, by_turns, in_ranks, pids_of_ranks, ratio, rounds, spread

RANKS = 2
TARGETS = {"ccl over gloo": 1.05, "no communication over ccl": 1.2, "ccl over sharded": 1.15}
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
        "rates: sharded": ("Speed over ccl with a share of the model in each process", "samples/s", ""),
        "ratios: ccl over sharded": (
            "A sharded step over ccl takes so many times as long as one of replicas",
            "x",
            "at most [target: ccl over sharded]",
        ),
        "rates: sharded, prefetch": ("And with each block gathered while another computes", "samples/s", ""),
        "ratios: prefetch over none": ("Prefetching makes a sharded step so many times as fast", "x", ""),
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
            "ccl over sharded": ratio(times["sharded"], times["ccl"]),
            "prefetch over none": ratio(times["sharded"], times["sharded, prefetch"]),
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
    sides["sharded"] = _sharded()
    sides["sharded, prefetch"] = _sharded(prefetch=True)
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
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    from bench import _bert

    model = torch.nn.parallel.DistributedDataParallel(
        _bert.model(), process_group=group, gradient_as_bucket_view=True
    )
    if compressed:
        model.register_comm_hook(group, bf16_compress_hook)
    return _measure_step(model, contextlib.nullcontext if talks else model.no_sync)


def _sharded(*, prefetch: bool = False) -> Callable[[], float]:
    import torch

    from bench import _bert
    from manycpu.pipeline.node import sharding

    model = sharding.shard(_bert.model(), dtype=torch.bfloat16)
    if prefetch:
        sharding.overlap(model)
    return _measure_step(model)


def _measure_step(model: Any, context: Callable[[], Any] = contextlib.nullcontext) -> Callable[[], float]:
    import torch
    import torch.distributed as dist

    from bench import _bert

    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
    step = _bert.stepper(model, optimizer, _bert.batch(), bf16=True)

    def measure() -> float:
        dist.barrier()
        began = time.perf_counter()
        step(context)
        dist.barrier()  # both ranks have done their step
        return time.perf_counter() - began

    return measure


if __name__ == "__main__":
    _rank(Path(sys.argv[1]))
