"""Saving a sharded training: the pause of `sharding.save`, beside torch's asynchronous saving of the same."""

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench._measure import agree, by_turns, in_ranks, pids_of_ranks, ratio, rounds, spread

RANKS = 2
STEPS = 6
WORDS = {
    "title": "Checkpoints of a sharded training",
    "meaning": "A checkpoint pauses the training; asynchronous saving competes with the steps for the cores.",
    "figures": {
        r"seconds: (.+)": (r"Six steps and \1", "s", ""),
        "pause: save": ("Pause of a checkpoint", "s", ""),
        "pause: asynchronous": ("Pause of an asynchronous one, which copies the shares first", "s", ""),
        "asynchronous over save": ("With an asynchronous one, six steps are so many times as fast", "x", ""),
    },
}


def main() -> dict[str, Any]:
    """Measure steps of BERT (67M, bf16) after a checkpoint that is written before them, or meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        measured = in_ranks(__file__, RANKS, folder, MANYCPU_BACKEND="ccl", MANYCPU_DTYPE="bf16")
    times, pauses = measured["times"], measured["pauses"]
    return {
        "unit": "s",
        "seconds": {name: spread(side) for name, side in times.items()},
        "pause": {name: spread(side) for name, side in pauses.items()},
        "asynchronous over save": ratio(times["a checkpoint"], times["an asynchronous checkpoint"]),
        "others' part of the cores": measured["others"],
    }


def _rank(out: Path, folder: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import async_save

    from bench import _bert
    from manycpu.pipeline.node import sharding

    dist.init_process_group()
    group: Any = dist.new_group(backend="gloo")
    model = sharding.shard(_bert.model(), dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
    step = _bert.stepper(model, optimizer, _bert.batch(), bf16=True)
    pauses: dict[str, list[float]] = {"save": [], "asynchronous": []}

    def side(name: str, save: Callable[[Path], Callable[[], object]]) -> Callable[[], float]:
        def measure() -> float:
            place = folder / name
            if dist.get_rank() == 0:
                shutil.rmtree(place, ignore_errors=True)
            dist.barrier()
            began = time.perf_counter()
            wait = save(place)
            if name in pauses:
                pauses[name].append(time.perf_counter() - began)
            for _ in range(STEPS):
                step()
            wait()
            dist.barrier()
            return time.perf_counter() - began

        return measure

    def save(place: Path) -> Callable[[], object]:
        sharding.save(place, model, optimizer, step=0)
        return lambda: None

    def save_meanwhile(place: Path) -> Callable[[], object]:
        sharding.release(model)
        states = get_state_dict(model, optimizer)
        shares = {"model": states[0], "optimizer": states[1]}
        writing: Any = async_save(shares, checkpoint_id=place, process_group=group)
        wait: Callable[[], object] = writing.result
        return wait

    sides = {
        "no checkpoint": side("none", lambda _: lambda: None),
        "a checkpoint": side("save", save),
        "an asynchronous checkpoint": side("asynchronous", save_meanwhile),
    }
    by_turns(sides, 1)
    for each in pauses.values():
        each.clear()
    times, others = by_turns(sides, rounds(8, 2), pids_of_ranks(), agree)
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"times": times, "pauses": pauses, "others": others}))
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(*map(Path, sys.argv[1:3]))
