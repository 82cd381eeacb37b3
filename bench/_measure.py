"""What benchmarks share: sides that take turns, medians with their spread, ratios, ranks, the machine."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from manycpu.pipeline.spec.hardware import flags
from manycpu.pipeline.spec.machine import Machine

Times = dict[str, list[float]]
QUICK = "MANYCPU_BENCH_QUICK"


class SkippedError(Exception):
    """This benchmark cannot run here; the message says why."""


def rounds(full: int, quick: int) -> int:
    """Choose how often to repeat: ``make bench-quick`` is content with less."""
    return quick if os.environ.get(QUICK) else full


def by_turns(sides: Mapping[str, Callable[[], float]], count: int) -> Times:
    """Measure each side once in every round, so that what disturbs one disturbs the others too."""
    times: Times = {name: [] for name in sides}
    for _ in range(count):
        for name, measure in sides.items():
            times[name].append(measure())
    return times


def spread(values: Sequence[float], digits: int = 4) -> dict[str, float]:
    """Give the median, and the least and greatest value."""
    found = {"median": statistics.median(values), "low": min(values), "high": max(values)}
    return {name: float(f"{value:.{digits}g}") for name, value in found.items()}


def ratio(slower: Sequence[float], faster: Sequence[float]) -> dict[str, float]:
    """Divide times that were measured one after the other: how many times as fast the second is."""
    return spread([one / other for one, other in zip(slower, faster, strict=True)], digits=3)


def in_ranks(file: str, count: int, *args: str, **env: str) -> dict[str, Any]:
    """Run a benchmark's ranks under torchrun and the node; what rank 0 wrote to the path it was given first.

    Args:
        file: The benchmark's own file.
        count: How many ranks.
        args: More arguments.
        env: Environment of the run, such as MANYCPU_BACKEND.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "figures.json")
        rank = [sys.executable, "-m", "manycpu.pipeline.node", file, str(out), *args]
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        known = {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*launch, "--no-python", *rank],
            check=False,
            capture_output=True,
            text=True,
            env=os.environ | known | env,
        )
        if done.returncode != 0:
            sys.exit(f"bench: the ranks of {file} failed\n{(done.stdout + done.stderr)[-3000:]}")
        figures: dict[str, Any] = json.loads(out.read_text())
    return figures


def machine() -> dict[str, object]:
    """Describe this machine."""
    found = Machine.observe()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    known = {"amx_bf16", "avx512_bf16", "avx512f", "avx2"} & flags()
    return {
        "cores": found.cores,
        "processor": next(
            (line.split(":")[1].strip() for line in lines if line.startswith("model name")), ""
        ),
        "instructions": sorted(known),
        "memory_gib": round((found.memory or 0) / 2**30),
        "python": ".".join(map(str, sys.version_info[:3])),
        **{name: _version(name) for name in ("torch", "oneccl-devel", "transformers")},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
