"""A bf16 step of BERT (67M) with Intel's extension on torch 2.8, beside torch alone: that one and today's."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench._measure import SkippedError, by_turns, ratio, rounds, spread
from manycpu.pipeline.spec.machine import Machine

ROOT = Path(__file__).parents[1]
LEGACY = ROOT / ".venv-legacy" / "bin" / "python"
SIDES = {
    "torch 2.8, extension 2.8": (str(LEGACY), "extension"),
    "torch 2.8": (str(LEGACY), "torch"),
    "torch of today": (sys.executable, "torch"),
}
WORDS = {
    "title": "Intel's extension",
    "meaning": "Today's torch needs no extension: alone it is about as fast as torch 2.8 with Intel's.",
    "figures": {
        "rates: torch 2.8, extension 2.8": ("Speed of torch 2.8 with the extension", "samples/s", ""),
        "rates: torch 2.8": ("Speed of torch 2.8 alone", "samples/s", ""),
        "rates: torch of today": ("Speed of today's torch alone", "samples/s", ""),
        "torch of today over the extension": (
            "Today's torch is so many times as fast as torch 2.8 with the extension",
            "x",
            "",
        ),
        "the extension over torch 2.8": ("The extension makes torch 2.8 so many times as fast", "x", ""),
    },
}


def main() -> dict[str, Any]:
    """Measure; each side is a process of its own, and its steps' median is one turn of it.

    Raises:
        SkippedError: The environment with the extension is not there.
    """
    if not LEGACY.exists():
        raise SkippedError("`make test-legacy` makes the environment that this needs")
    if not rounds(1, 0):
        raise SkippedError("three environments take too long for a quick look")
    turns = by_turns({name: turn(*side) for name, side in SIDES.items()}, 4).times
    extension = turns["torch 2.8, extension 2.8"]
    return {
        "unit": "samples/s",
        "rates": {name: spread([1 / seconds for seconds in times]) for name, times in turns.items()},
        "torch of today over the extension": ratio(extension, turns["torch of today"]),
        "the extension over torch 2.8": ratio(turns["torch 2.8"], extension),
    }


def turn(python: str, how: str, **more: str) -> Any:
    """Return a function that runs some steps in a process of its own, with more in its environment."""
    env = {
        **os.environ,
        **more,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / '.dev'}",
        "OMP_NUM_THREADS": str(int(Machine.observe().cores)),
    }

    def measure() -> float:
        """Seconds that a sample takes."""
        done = subprocess.run([python, __file__, how], env=env, check=True, capture_output=True)
        return float(json.loads(done.stdout.splitlines()[-1]))

    return measure


def _steps(how: str) -> float:
    import torch

    from bench import _bert

    model = _bert.model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
    if how == "extension":
        import intel_extension_for_pytorch as ipex  # legacy environment only

        model, optimizer = ipex.optimize(model, optimizer=optimizer, dtype=torch.bfloat16, inplace=True)
    step = _bert.stepper(model, optimizer, _bert.batch(), bf16=True)

    def measure() -> float:
        began = time.perf_counter()
        step()
        return time.perf_counter() - began

    by_turns({"step": measure}, 2)
    times = by_turns({"step": measure}, 12, [os.getpid()]).times["step"]
    return spread(times)["median"] / _bert.BATCH


if __name__ == "__main__":
    sys.stdout.write(f"{json.dumps(_steps(sys.argv[1]))}\n")
