"""A bf16 step of BERT (67M) with the libraries that the CPU plan preloads where they are, and without."""

import sys
from typing import Any

from bench import ipex
from bench._measure import SkippedError, by_turns, ratio, rounds, spread
from manycpu.pipeline.spec.cpu_plan import plan
from manycpu.pipeline.spec.machine import Machine

WORDS = {
    "title": "Libraries that are preloaded",
    "meaning": "What the CPU plan preloads where it is installed makes a step faster.",
    "figures": {
        "rates: none": ("Speed with nothing preloaded", "samples/s", ""),
        "rates: (.+)": (r"Speed with \1", "samples/s", ""),
        "over none: (.+)": (r"With \1 a step is so many times as fast", "x", ""),
    },
}


def main() -> dict[str, Any]:
    """Measure each library by itself, and what the plan chooses of them.

    Raises:
        SkippedError: None of them is installed.
    """
    machine = Machine.observe()
    libraries = dict(machine.libraries or {})
    if not libraries:
        raise SkippedError("neither tcmalloc nor jemalloc nor libiomp5 is installed")
    sides = {"none": "", **libraries, "the CPU plan's": ":".join(plan(machine).preload)}
    measures = {name: ipex.turn(sys.executable, "torch", LD_PRELOAD=path) for name, path in sides.items()}
    times = by_turns(measures, rounds(4, 1)).times
    return {
        "unit": "samples/s",
        "rates": {name: spread([1 / seconds for seconds in side]) for name, side in times.items()},
        "over none": {name: ratio(times["none"], side) for name, side in times.items() if name != "none"},
    }
