"""A training step of resnet50d at 224 x 224 in one process with all cores: bf16, channels_last, compiled."""

import os
import time
from collections.abc import Callable
from typing import Any

from bench._measure import by_turns, ratio, rounds, spread

BATCH, SIZE, CLASSES = 8, 224, 37
PRECISIONS = {  # name -> bf16, channels_last, compiled
    "fp32": (False, False, False),
    "fp32 channels_last": (False, True, False),
    "bf16": (True, False, False),
    "bf16 channels_last": (True, True, False),
    "bf16 channels_last compiled": (True, True, True),
}
WORDS = {
    "title": "A training step on images",
    "meaning": "bf16 and channels_last belong together; with the body frozen a step takes about a third.",
    "figures": {
        r"rates: (.+?): (.+)": (r"\1, \2", "images/s", ""),
        r"over fp32: (.+?): (.+)": (r"\1, \2 is so many times as fast as fp32", "x", ""),
        r"first_call_seconds: (.+?): (.+)": (r"\1, the first step of \2 takes", "s", ""),
    },
}


def main() -> dict[str, Any]:
    """Measure with the body frozen, and the whole model trained."""
    import torch

    from manycpu.pipeline.spec.machine import Machine

    torch.set_num_threads(int(Machine.observe().cores))
    parts = {name: _part(frozen=name == "frozen") for name in ("frozen", "unfrozen")}
    return {
        "unit": "images/s",
        **{
            figure: {name: part[figure] for name, part in parts.items()}
            for figure in ("rates", "over fp32", "first_call_seconds")
        },
        "others' part of the cores": max(part["others"] for part in parts.values()),
    }


def _part(*, frozen: bool) -> dict[str, Any]:
    # Compiled only as the recipe trains by default: that takes a minute, too long for a quick look.
    with_compiled = frozen and rounds(1, 0)
    chosen = {name: choice for name, choice in PRECISIONS.items() if with_compiled or not choice[-1]}
    sides = {name: _side(frozen, *choice) for name, choice in chosen.items()}
    first = by_turns(sides, 1).times
    times, others = by_turns(sides, rounds(6, 2), [os.getpid()])
    return {
        "rates": {name: spread([BATCH / value for value in side]) for name, side in times.items()},
        "over fp32": {name: ratio(times["fp32"], times[name]) for name in times if name != "fp32"},
        "first_call_seconds": {name: round(side[0], 1) for name, side in first.items()},
        "others": others,
    }


def _side(frozen: bool, bf16: bool, channels_last: bool, compiled: bool) -> Callable[[], float]:
    import timm
    import torch

    torch.manual_seed(0)
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    model = timm.create_model("resnet50d", num_classes=CLASSES).train().to(memory_format=memory_format)
    if frozen:
        model.requires_grad_(requires_grad=False)
        model.get_classifier().requires_grad_(requires_grad=True)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-5, fused=True)
    images = torch.randn(BATCH, 3, SIZE, SIZE).to(memory_format=memory_format)
    labels = torch.randint(0, CLASSES, (BATCH,))
    called = torch.compile(model) if compiled else model

    def measure() -> float:
        began = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            scores = called(images)
        torch.nn.functional.cross_entropy(scores.float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    return measure
