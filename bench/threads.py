"""Threads by the CPU plan against torch's defaults: two and four processes, Hogwild and DDP, small CNN."""

import os
import time
from functools import partial
from typing import Any

from bench._measure import by_turns, ratio, rounds, spread
from manycpu.pipeline.spec.cpu_plan import THREAD_VARIABLES, CpuRequest, plan
from manycpu.pipeline.spec.machine import Machine

PROCESSES = (2, 4)
SECONDS = 2.0
BATCH = 64
TARGET = 5
WORDS = {
    "title": "Threads by the CPU plan",
    "meaning": "Processes that share a machine's cores train many times as fast once each has its own, as "
    "the CPU plan gives them; by torch's defaults each has a thread for every core.",
    "figures": {
        r"rates: (\w+), (\d+) processes, defaults": (
            r"\1, \2 processes, torch's defaults: speed",
            "samples/s",
            "",
        ),
        r"rates: (\w+), (\d+) processes, planned": (
            r"\1, \2 processes, the CPU plan: speed",
            "samples/s",
            "",
        ),
        r"planned over defaults: (\w+), (\d+) processes": (
            r"\1, \2 processes: the plan is so many times as fast as the defaults",
            "x",
            r"at least [target: \2 processes on 2 cores]",
        ),
    },
}


def main() -> dict[str, Any]:
    """Measure; defaults are those of a process without any setting."""
    for name in THREAD_VARIABLES:
        os.environ.pop(name, None)
    rates: dict[str, Any] = {}
    ratios: dict[str, Any] = {}
    for kind in ("hogwild", "ddp"):
        for count in PROCESSES:
            turns = _by_turns(kind, count)
            name = f"{kind}, {count} processes"
            rates |= {f"{name}, {side}": spread(values) for side, values in turns.items()}
            ratios[name] = ratio(turns["planned"], turns["defaults"])
    return {
        "unit": "samples/s",
        "rates": rates,
        "planned over defaults": ratios,
        "target": {"4 processes on 2 cores": TARGET},
    }


def _by_turns(kind: str, count: int) -> dict[str, list[float]]:
    node_plan = plan(Machine.observe(), CpuRequest(processes=count))
    pins = [{cpu.number for cpu in pin} for pin in node_plan.pins]
    sides: dict[str, tuple[int | None, list[set[int]]]] = {
        "defaults": (None, []),
        "planned": (node_plan.threads, pins),
    }
    measures = {name: partial(_rate, kind, count, *side) for name, side in sides.items()}
    return by_turns(measures, rounds(3, 1)).times


def _rate(kind: str, count: int, threads: int | None, pins: list[set[int]]) -> float:
    """Train for some seconds; samples per second of all processes."""
    import torch.multiprocessing as mp

    from bench import _cnn

    context = mp.get_context("forkserver")  # which imports torch once, without threads or settings
    context.set_forkserver_preload(["bench._cnn"])
    ready, go, stop = context.Barrier(count + 1), context.Event(), context.Event()
    shared = _cnn.model().share_memory()
    job = _cnn.Job(kind, count, threads, pins, _cnn.free_port(), shared, ready, go, stop, context.Queue())
    workers = [context.Process(target=_cnn.work, args=(rank, job)) for rank in range(count)]
    for worker in workers:
        worker.start()
    ready.wait()
    began = time.perf_counter()
    go.set()
    time.sleep(SECONDS)
    stop.set()
    done = sum(job.steps.get() for _ in workers)
    seconds = time.perf_counter() - began
    for worker in workers:
        worker.join()
    return done * BATCH / seconds
