"""A training step of BERT (67M) in one process with all cores: fp32, bf16, fused AdamW, compiled."""

import os
import time
from collections.abc import Callable
from typing import Any

from bench._measure import by_turns, ratio, rounds, spread

TARGET = 1.8
SIDES = {  # name -> bf16, fused, compiled
    "fp32": (False, False, False),
    "fp32 fused": (False, True, False),
    "bf16": (True, False, False),
    "bf16 fused": (True, True, False),
    "bf16 fused compiled": (True, True, True),
}
WORDS = {
    "title": "A training step of one process",
    "meaning": "On processors with AMX, bf16 and a fused AdamW more than double the speed; compiling adds "
    "a little.",
    "figures": {
        r"rates: (.+)": (r"Speed in \1", "samples/s", ""),
        "over fp32: bf16 fused": (
            "bf16 fused is so many times as fast as fp32",
            "x",
            "with AMX, at least [target: bf16 fused over fp32, with AMX]",
        ),
        r"over fp32: (.+)": (r"\1 is so many times as fast as fp32", "x", ""),
        r"first_call_seconds: (.+)": (r"The first step in \1 takes", "s", ""),
    },
}


def main() -> dict[str, Any]:
    """Measure; the first call of the compiled step is its price, and too long for a quick look."""
    import torch

    from manycpu.pipeline.spec.machine import Machine

    torch.set_num_threads(int(Machine.observe().cores))
    sides = {name: _side(*choice) for name, choice in SIDES.items() if rounds(1, 0) or not choice[-1]}
    first = by_turns(sides, 1).times
    times, others = by_turns(sides, rounds(16, 3), [os.getpid()])
    return {
        "unit": "samples/s",
        "rates": {name: spread([_batch() / value for value in side]) for name, side in times.items()},
        "over fp32": {name: ratio(times["fp32"], times[name]) for name in times if name != "fp32"},
        "target": {"bf16 fused over fp32, with AMX": TARGET},
        "others' part of the cores": others,
        "first_call_seconds": {name: round(side[0], 1) for name, side in first.items()},
    }


def _batch() -> int:
    from bench._bert import BATCH

    return BATCH


def _side(bf16: bool, fused: bool, compiled: bool) -> Callable[[], float]:
    import torch

    from bench import _bert

    model = _bert.model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=fused)
    step = _bert.stepper(torch.compile(model) if compiled else model, optimizer, _bert.batch(), bf16=bf16)

    def measure() -> float:
        began = time.perf_counter()
        step()
        return time.perf_counter() - began

    return measure
