"""Made-up reports: one of a usual run, one of a very large run, and damaged ones."""

import math
import random
from collections.abc import Iterator
from typing import Any

HOSTILE = "<img src=x onerror=\"document.title='owned'\">"
_BEGAN = 1763856000.0
Report = dict[str, Any]


def curve(points: int, every: int, last: float, *, noise: float = 0.05, seed: int = 1) -> dict[str, Any]:
    """Return a series of so many points that falls towards ``last``, with a point each ``every`` steps."""
    chance = random.Random(seed)  # noqa: S311 - not a secret
    shares = [at / max(1, points - 1) for at in range(points)]
    values = [last * (1 + 4 * math.exp(-5 * share) + chance.gauss(0, noise)) for share in shares]
    return {
        "index": list(range(points)),
        "steps": [every * (at + 1) for at in range(points)],
        "times": [_BEGAN + 0.41 * every * (at + 1) for at in range(points)],
        "values": values,
    }


def rank(number: int, host: str, step_seconds: float, wait_seconds: float | None) -> dict[str, Any]:
    """Return a rank of a report; ``wait_seconds`` is how long it waits for others in each step."""
    return {
        "rank": number,
        "host": host,
        "hostname": f"weekly-worker-{number}",
        "cpus": 4.0,
        "threads": 4,
        "devices": None,
        "exit_code": 0,
        "pace": {
            "time": _BEGAN + 330,
            "step": 800,
            "step_seconds": step_seconds,
            "samples_per_second": 12 / step_seconds,
            "wait_seconds": wait_seconds,
        },
    }


def usual_report(**other: Any) -> Report:
    """Return the report of a run over two nodes, whose first attempt failed; ``other`` replaces fields."""
    series = {
        "loss": curve(160, 5, 0.6123456789),
        "learning_rate": {**curve(160, 5, 1), "values": [3e-5 * (1 - at / 160) for at in range(160)]},
        "samples_per_second": curve(160, 5, 39.0, noise=0.01),
        "grad_norm": curve(160, 5, 1.2, noise=0.2),
        "eval_f1": {**curve(4, 200, 1), "values": [61.2, 84.9, 91.7, 93.1]},
        "eval_exact_match": {**curve(1, 800, 1), "values": [87.25]},
        "epoch_size": {**curve(20, 40, 1), "values": [1600.0] * 20},
        HOSTILE: {**curve(30, 25, 0.5), "steps": [None] * 30},
    }
    report: Report = {
        "schema_version": 1,
        "key": "1f0c9a77ab12cd34",
        "name": "weekly-ab12cd",
        "state": "succeeded",
        "attempts": 2,
        "history": [
            {"attempt": 1, "state": "failed", "reason": "rank 1 on node-b: exit code 1", "seconds": 81.2},
            {"attempt": 2, "state": "succeeded", "reason": None, "seconds": 331.9},
        ],
        "run": {
            "program": "question_answering",
            "args": ["--num_train_epochs", "2"],
            "nnodes": 2,
            "nproc_per_node": 2,
            "backend": None,
            "dtype": "bf16",
            "output": "s3://models/qa/2026-01-01",
        },
        "target": {"kind": "kubernetes", "launch": "pytorchjob", "namespace": "ml"},
        "world_size": 4,
        "hosts": ["node-a", "node-b"],
        "backend": "ccl",
        "backend_reason": "every rank has it",
        "ranks": [
            *(rank(0, "node-a", 0.41, 0.09), rank(1, "node-a", 0.41, 0.08)),
            *(rank(2, "node-b", 0.41, 0.02), rank(3, "node-b", 0.41, 0.07)),
        ],
        "rounds": [
            {
                "round": 0,
                "world_size": 4,
                "began": _BEGAN,
                "hosts": ["node-a", "node-b"],
                "ranks": [0, 1, 2, 3],
            }
        ],
        "metrics": {
            **{name: each["values"][-1] for name, each in series.items()},
            "total_flos": 1234567890123456,
            "best": None,
            "note": "kept",
            "eval_samples": 10570,
        },
        "series": series,
        "warnings": ["rank 1 has 4 threads on 2 cores"],
        "verbs": {
            "prepare": {"seconds": 1.52, "result": "done", "error": None},
            "stage": {"seconds": 12.104, "result": "reused", "error": None},
            "build": {"seconds": 3.04, "result": "done", "error": None},
            "launch": {"seconds": 2.75, "result": "done", "error": None},
            "wait": {"seconds": 331.9, "result": "done", "error": None},
            "export": {"seconds": 18.31, "result": "done", "error": None},
            "cleanup": {"seconds": 4.4, "result": "done", "error": None},
        },
        "image": "sha256:" + "9f86d081" * 8,
        "digests": {"data": "5e88" * 16, "model": "a665" * 16, "code": "b17e" * 16},
        "export": {
            "path": "s3://models/qa/2026-01-01",
            "files": 9,
            "bytes": 437_912_344,
            "sha256": "c0de" * 16,
        },
        "kept": ["/claim/manycpu/data/5e88", "/claim/manycpu/code/b17e"],
        "left_behind": [],
        "error": None,
        "time": _BEGAN + 400,
    }
    return {**report, **other}


def large_report() -> Report:
    """Return the report of 100,000 steps on 64 ranks with 40 metrics; its series are thinned."""
    names = ["loss", "learning_rate", "samples_per_second", *(f"metric_{number:02}" for number in range(37))]
    series = {name: curve(300, 333, 0.5 + at, seed=at) for at, name in enumerate(names)}
    ranks = [rank(at, f"node-{at // 2:02}", 0.4 + 0.001 * at, 0.01) for at in range(64)]
    return usual_report(
        name="large",
        series=series,
        metrics={name: each["values"][-1] for name, each in series.items()},
        ranks=ranks,
        world_size=64,
        hosts=[f"node-{at:02}" for at in range(32)],
        run={"program": "train.py", "nnodes": 32, "nproc_per_node": 2},
    )


_ODD: tuple[Any, ...] = (None, 1, -1, "x", "", [], {}, 1e308, True, 0, [None], {"a": None}, 5e-324, "1:x")


def odd_report(seed: int) -> Report:
    """Return a usual report in which one to six parts, which the seed draws, have an unexpected type."""
    chance = random.Random(seed)  # noqa: S311 - not a secret
    report = usual_report(progress={"step": 1, "total_steps": 4})
    for _ in range(chance.choice([1, 2, 6])):
        holder, name = chance.choice([*_places(report)])
        holder[name] = chance.choice(_ODD)
    return report


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each part of a report as its container and its key; of a long list, only the first three."""
    names = [*value] if isinstance(value, dict) else [*range(min(3, len(value)))]
    for name in names:
        yield value, name
        if isinstance(value[name], dict | list):
            yield from _places(value[name])
