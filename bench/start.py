"""From the launch to a program's first line, beside `python -c "import torch"`: sides take turns; seconds.

The least of each is what the start costs where nothing disturbs it.
"""

import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, Literal

from bench._measure import by_turns, ratio, rounds, spread
from manycpu.pipeline.adapters import process
from manycpu.pipeline.launchers import LAUNCHERS
from manycpu.pipeline.spec import events
from manycpu.pipeline.spec.placement import Placement
from manycpu.pipeline.spec.targets import Local
from manycpu.pipeline.spec.training_run import TrainingRun

_Launch = Literal["processes", "torchrun"]
BARE = 'python -c "import torch"'
SCRIPT = """\
import time
print("first", time.time(), flush=True)
import torch.distributed
torch.distributed.init_process_group()
"""
LIMIT = 120.0  # seconds
WORDS = {
    "title": "From the launch of a run to the first line of its program",
    "meaning": "Starting a run costs little more than importing torch.",
    "figures": {
        'seconds: python -c "import torch"': ("Importing torch alone", "s", ""),
        "seconds: (.+)": (r"First line of a program, \1", "s", ""),
        "over import torch: (.+)": (
            r"So many times an import of torch, \1",
            "x",
            "at most [target: over import torch]",
        ),
        "least over least: (.+)": (r"The same, the quickest of each, \1", "x", ""),
    },
}


def main() -> dict[str, Any]:
    """Measure."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(SCRIPT)
        sides = {
            BARE: _import_torch,
            "one rank": partial(_first_line, script, 1),
            "two ranks": partial(_first_line, script, 2),
            "two ranks, torchrun": partial(_first_line, script, 2, "torchrun"),
        }
        _import_torch()  # the first time is for the disk
        times = by_turns(sides, rounds(9, 1)).times
    return {
        "unit": "s",
        "seconds": {side: spread(seconds, digits=3) for side, seconds in times.items()},
        "over import torch": {
            side: ratio(seconds, times[BARE]) for side, seconds in times.items() if side != BARE
        },
        "least over least": {
            side: round(min(seconds) / min(times[BARE]), 2) for side, seconds in times.items() if side != BARE
        },
        "target": {"over import torch": 1.25},
    }


def _import_torch() -> float:
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - begun


def _first_line(script: Path, ranks: int, launch: _Launch = "processes") -> float:
    """Launch a run, supervisor and all; seconds until the program has begun on the last of its ranks."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = process.Job("bench-start", 1, LIMIT, LIMIT, None)
        with (folder / "lock").open("w") as lock:
            begun = time.time()
            handle = process.start(_manifest(script, folder, ranks, launch), folder, job, lock.fileno())
        process.wait_until_gone(handle, LIMIT)
        words = [events.split(line).text.split() for line in (folder / process.LOG).read_text().splitlines()]
    first = [float(line[1]) for line in words if line[:1] == ["first"]]
    if len(first) != ranks:
        sys.exit(f"bench: {len(first)} of {ranks} ranks began: {words}")
    return max(first) - begun


def _manifest(script: Path, folder: Path, ranks: int, launch: _Launch) -> dict[str, Any]:
    run = TrainingRun(program=str(script), output=str(folder / "model"), nproc_per_node=ranks)
    places = {name: str(folder / name) for name in ("output", "checkpoints", "caches")}
    placement = Placement(
        name="bench-start",
        attempt=1,
        python=sys.executable,
        code=str(script.parent),
        program=(str(script),),
        attempt_directory=str(folder),
        **places,
    )
    return LAUNCHERS[launch].objects(run, Local(launch=launch), placement)[-1]
