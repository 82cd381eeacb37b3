"""Training steps of BERT (67M) in bf16 over ccl, in one process and in several, as far as the cores go."""

import json
import sys
import time
from pathlib import Path
from typing import Any

from bench._measure import agree, by_turns, in_ranks, pids_of_ranks, rounds, spread
from manycpu.pipeline.spec.machine import Machine

WORDS = {
    "title": "Scaling over the cores of a machine",
    "meaning": "Each process more, on a core of its own, adds most of the speed of the first.",
    "figures": {
        r"rates: processes: (\d+)": (r"Speed, number of processes: \1", "samples/s", ""),
        r"over one process: (\d+)": (
            r"So many times the speed of one process, number of processes: \1",
            "x",
            "",
        ),
    },
}


def main() -> dict[str, Any]:
    """Measure; each process has one core and a batch of its own, so that work grows with processes."""
    counts = [2**power for power in range(int(Machine.observe().cores).bit_length())]
    by_count: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(rounds(2, 1)):
        for count in counts:
            env = {"MANYCPU_BACKEND": "ccl", "MANYCPU_DTYPE": "bf16", "MANYCPU_CPUS": str(count)}
            by_count[count] += in_ranks(__file__, count, **env)["rates"]
    single = spread(by_count[1])["median"]
    over = {str(count): round(spread(rates)["median"] / single, 3) for count, rates in by_count.items()}
    return {
        "unit": "samples/s",
        "rates": {f"processes: {count}": spread(rates) for count, rates in by_count.items()},
        "over one process": over,
    }


def _rank(out: Path) -> None:
    import torch
    import torch.distributed as dist

    from bench import _bert

    dist.init_process_group()
    model = torch.nn.parallel.DistributedDataParallel(_bert.model(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
    step = _bert.stepper(model, optimizer, _bert.batch(), bf16=True)

    def measure() -> float:
        dist.barrier()
        began = time.perf_counter()
        step()
        dist.barrier()
        return time.perf_counter() - began

    pids = pids_of_ranks()
    by_turns({"step": measure}, 1)
    times = by_turns({"step": measure}, rounds(12, 4), pids, agree).times["step"]
    if dist.get_rank() == 0:
        out.write_text(
            json.dumps({"rates": [dist.get_world_size() * _bert.BATCH / value for value in times]})
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(Path(sys.argv[1]))
