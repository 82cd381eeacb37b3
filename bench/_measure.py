"""What benchmarks share: sides that take turns, medians with their spread, ratios, ranks, the machine."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from manycpu.pipeline.spec.machine import Machine, processor_flags

SECONDS = (90, 6)  # that turns may take in all, and when quick
QUICK = "MANYCPU_BENCH_QUICK"


class Turns(NamedTuple):
    """The times of each side, in every turn that counts."""

    times: dict[str, list[float]]
    others: float
    """Part of the cores' time that other processes took meanwhile, 0 to 1; the median over the turns kept."""


class SkippedError(Exception):
    """This benchmark cannot run here; the message says why."""


def rounds(full: int, quick: int) -> int:
    """Choose how often to repeat: less often in ``make bench-quick``."""
    return quick if os.environ.get(QUICK) else full


def by_turns(
    sides: Mapping[str, Callable[[], float]],
    count: int,
    pids: Sequence[int] = (),
    agreed: Callable[[bool], bool] = bool,
) -> Turns:
    """Measure each side once in every turn, so that what disturbs one disturbs the others too.

    It ends early, after two turns at least, when its time is over: :data:`SECONDS`.

    Args:
        sides: Name -> what measures it once, in seconds or as a rate.
        count: Turns; the quieter half of them is kept.
        pids: The benchmark's processes; with none of them named, all turns are kept.
        agreed: Makes one answer of what all ranks think of whether the time is over.
    """
    turns: list[tuple[float, dict[str, float]]] = []
    end = time.monotonic() + rounds(*SECONDS)
    while len(turns) < count and not (agreed(time.monotonic() > end) and len(turns) > 1):
        clock = _Clock(pids)
        turn = {name: measure() for name, measure in sides.items()}
        turns.append((clock.others(), turn))
    if pids:
        turns = sorted(turns, key=lambda turn: turn[0])[: (count + 1) // 2]
    times = {name: [turn[name] for _, turn in turns] for name in sides}
    return Turns(times, round(statistics.median(share for share, _ in turns), 3))


class _Clock:
    """Measures the part of the cores' time that other processes have taken since it was made."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._processes = [psutil.Process(pid) for pid in pids]
        self._began, self._all, self._own = time.perf_counter(), self._busy(), self._ours()

    def others(self) -> float:
        wall = (time.perf_counter() - self._began) * (psutil.cpu_count() or 1)
        return max(0.0, self._busy() - self._all - (self._ours() - self._own)) / wall

    def _busy(self) -> float:
        times = psutil.cpu_times()
        return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - times.guest - times.guest_nice)

    def _ours(self) -> float:
        used = [process.cpu_times() for process in self._processes]
        return float(sum(times.user + times.system for times in used))


def spread(values: Sequence[float], digits: int = 4) -> dict[str, float]:
    """Summarise values as their median, least and greatest."""
    summary = {"median": statistics.median(values), "low": min(values), "high": max(values)}
    return {name: float(f"{value:.{digits}g}") for name, value in summary.items()}


def ratio(slower: Sequence[float], faster: Sequence[float]) -> dict[str, float]:
    """Divide times that were measured one after the other: how many times as fast the second is."""
    return spread([first / second for first, second in zip(slower, faster, strict=True)], digits=3)


def in_a_row(call: Callable[[], object], repeats: int, meet: Callable[[], object]) -> Callable[[], float]:
    """Return a function that times one of several calls in a row, in seconds; ranks meet before the first."""

    def measure() -> float:
        meet()
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - began) / repeats

    return measure


def pids_of_ranks() -> list[int]:
    """Gather the process ids of all ranks."""
    import torch.distributed as dist

    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    return pids


def agree(over: bool) -> bool:
    """Agree with all ranks to end when one of them finds that it is time."""
    import torch
    import torch.distributed as dist

    vote = torch.tensor([int(over)])
    dist.all_reduce(vote, dist.ReduceOp.MAX)
    return bool(vote.item())


def in_ranks(file: str, count: int, *args: str, **env: str) -> dict[str, Any]:
    """Run a benchmark's ranks under the node; what rank 0 wrote to the path it was given first.

    Args:
        file: The benchmark's own file.
        count: How many ranks.
        args: More arguments.
        env: Environment of the run, such as MANYCPU_BACKEND.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "figures.json")
        ranks = [sys.executable, "-m", "manycpu.pipeline.node", f"--nproc-per-node={count}"]
        variables = {"PYTHONPATH": str(Path(__file__).parents[1])}
        done = subprocess.run(
            [*ranks, file, str(out), *args],
            check=False,
            capture_output=True,
            text=True,
            env=os.environ | variables | env,
        )
        if done.returncode != 0:
            sys.exit(f"bench: the ranks of {file} failed\n{(done.stdout + done.stderr)[-3000:]}")
        figures: dict[str, Any] = json.loads(out.read_text())
    return figures


def over_gloo(file: str, count: int) -> dict[str, Any]:
    """Run a benchmark's file in ranks over ccl; compare its collectives with gloo's and with a copy."""
    turns = in_ranks(file, count, MANYCPU_BACKEND="ccl")
    figures: dict[str, Any] = {}
    for name, (times, _) in turns.items():
        figures[f"{name}: ccl over gloo"] = ratio(times["gloo"], times["ccl"])
        figures[f"{name}: ccl, part of a memory copy's speed"] = ratio(times["copy"], times["ccl"])
    others = {name: share for name, (_, share) in turns.items()}
    return figures | {"others' part of the cores": max(others.values())}


def machine() -> dict[str, object]:
    """Describe this machine."""
    observed = Machine.observe()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    instructions = {"amx_bf16", "avx512_bf16", "avx512f", "avx2"} & processor_flags()
    return {
        "cores": observed.cores,
        "processor": next(
            (line.split(":")[1].strip() for line in lines if line.startswith("model name")), ""
        ),
        "instructions": sorted(instructions),
        "memory_gib": round((observed.memory or 0) / 2**30),
        "python": ".".join(map(str, sys.version_info[:3])),
        **{name: _version(name) for name in ("torch", "oneccl-devel", "transformers")},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
