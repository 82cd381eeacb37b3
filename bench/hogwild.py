"""The recipe hogwild with four processes: torch's default threads, 16 each, and the CPU plan's floor(N/M)."""

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from bench._measure import by_turns, ratio, rounds, spread
from manycpu.pipeline.spec.cpu_plan import THREAD_VARIABLES, CpuRequest, plan
from manycpu.pipeline.spec.machine import Machine

PROCESSES = 4
MANY = 16
CLAIM = 30
WORDS = {
    "title": "Hogwild's threads: a tutorial's claim",
    "meaning": "PyTorch's tutorial on many processes on CPUs trains its Hogwild example 30 times as fast "
    "with floor(N/M) threads in each of M processes on N cores as by defaults; this is the recipe `hogwild`, "
    "on the digits of scikit-learn, from its first step to its last.",
    "figures": {
        r"rates: defaults": ("4 processes, torch's default threads: speed", "samples/s", ""),
        r"rates: 16 threads": ("4 processes, 16 threads each: speed", "samples/s", ""),
        r"rates: planned": ("4 processes, floor(N/M) threads: speed", "samples/s", ""),
        r"planned over defaults": (
            "floor(N/M) is so many times as fast as torch's defaults",
            "x",
            r"the tutorial's claim: [target: claimed]",
        ),
        r"planned over 16 threads": ("floor(N/M) is so many times as fast as 16 threads each", "x", ""),
    },
}


def main() -> dict[str, Any]:
    """Measure; defaults are those of a process without any setting."""
    planned = plan(Machine.observe(), CpuRequest(processes=1, subprocesses=PROCESSES)).threads
    sides = {"defaults": 0, "16 threads": MANY, "planned": planned}
    measures = {name: partial(_rate, threads) for name, threads in sides.items()}
    times = by_turns(measures, rounds(3, 1)).times
    return {
        "unit": "samples/s",
        "rates": {name: spread(values) for name, values in times.items()},
        "planned over defaults": ratio(times["planned"], times["defaults"]),
        "planned over 16 threads": ratio(times["planned"], times["16 threads"]),
        "target": {"claimed": CLAIM},
    }


def _rate(threads: int) -> float:
    """Train an epoch; samples per second of all processes."""
    env = {name: value for name, value in os.environ.items() if name not in THREAD_VARIABLES}
    words = ["--num-processes", str(PROCESSES), "--epochs", "1", "--threads-per-process", str(threads)]
    recipe = [sys.executable, "-m", "manycpu.pipeline.recipes.hogwild", "--start-method", "fork"]
    with tempfile.TemporaryDirectory() as folder:
        env |= {"MANYCPU_OUTPUT": folder}
        done = subprocess.run([*recipe, *words], check=False, capture_output=True, text=True, env=env)
        if done.returncode != 0:
            sys.exit(f"bench: the recipe failed\n{done.stderr[-3000:]}")
        results = json.loads(Path(folder, "all_results.json").read_text())
    return float(results["train_samples_per_second"])
