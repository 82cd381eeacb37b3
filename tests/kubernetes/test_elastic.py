"""An elastic run that loses a node."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster.space import Space

from manycpu.pipeline import train
from manycpu.pipeline.listeners import Silent
from manycpu.pipeline.spec.events import RankLine

# Counts the steps of all four, for ever; begun anew at step 5 or later, it takes 5 more and ends.
SCRIPT = """
import os, pathlib, time, torch, torch.distributed as dist
from manycpu.pipeline.node.metrics import metrics
dist.init_process_group()
checkpoint = pathlib.Path(os.environ["MANYCPU_CHECKPOINTS"], "step")
step = begun = int(checkpoint.read_text()) if checkpoint.exists() else 0
while begun < 5 or step < begun + 5:
    dist.all_reduce(torch.ones(1))
    step += begun >= 5 or dist.get_world_size() == 4
    if dist.get_rank() == 0:
        checkpoint.with_suffix(".part").write_text(str(step))
        checkpoint.with_suffix(".part").replace(checkpoint)
    if step == 5:
        print("reached step 5", flush=True)
    time.sleep(0.1)
metrics({"begun_at": begun, "ended_at": step})
pathlib.Path(os.environ["MANYCPU_OUTPUT"], "model.txt").write_text("trained")
"""

A_QUARTER = {"cpu": 0.4, "memory": "1Gi"}  # two workers on each node
pytestmark = pytest.mark.pod_security("restricted")


class Killer(Silent):
    """Listens to a run, and kills a pod when all four ranks have come far enough."""

    def __init__(self, namespace: Space) -> None:
        self.namespace, self.there = namespace, 0

    def line(self, line: RankLine) -> None:
        self.there += line.text == "reached step 5"
        if self.there == 4:
            self.there += 1
            pods = [pod.metadata.name for pod in self.namespace.pods("manycpu/role=rank")]
            victim = next(name for name in pods if name.endswith("-worker-3"))
            self.namespace.core.delete_namespaced_pod(victim, self.namespace.name, grace_period_seconds=0)


@pytest.mark.timeout(400)
def test_of_four_workers_one_is_killed_and_the_others_go_on_from_the_checkpoint(
    target: dict[str, Any], a_run: Callable[..., dict[str, Any]], namespace: Space, tmp_path: Path
) -> None:
    killer = Killer(namespace)
    run = a_run(SCRIPT, nnodes="1:4", max_restarts=3, spread="prefer", resources=A_QUARTER)
    report = train(run, target, run_id="elastic", listener=killer)
    assert killer.there > 4
    assert (report.state, report.attempts, report.left_behind) == ("succeeded", 1, [])
    assert report.metrics["begun_at"] >= 5
    assert report.metrics["ended_at"] == report.metrics["begun_at"] + 5
    worlds = [found["world_size"] for found in report.rounds]
    assert 4 in worlds[:-1], "nobody met again after all four had"
    assert [sorted(found["ranks"]) for found in report.rounds] == [list(range(world)) for world in worlds]
    assert (tmp_path / "out" / "model.txt").read_text() == "trained"
