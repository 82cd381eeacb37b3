"""An elastic run that loses a pod continues."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster.space import Space
from support.losing_pods import LosesAtStep5
from support.training_scripts import goes_on

from manycpu.pipeline import train

A_QUARTER = {"cpu": 0.4, "memory": "1Gi"}  # space for two workers on each node
pytestmark = pytest.mark.pod_security("restricted")


def test_of_four_workers_one_is_killed_and_the_others_go_on_from_the_checkpoint(
    target: dict[str, Any], a_run: Callable[..., dict[str, Any]], namespace: Space, tmp_path: Path
) -> None:
    killer = LosesAtStep5(namespace, ranks=4)
    run = a_run(goes_on(4), nnodes="1:4", max_restarts=3, spread="prefer", resources=A_QUARTER)
    report = train(run, target, run_id="elastic", listener=killer)
    assert killer.there > 4
    assert (report.state, report.attempts, report.left_behind) == ("succeeded", 1, [])
    assert report.metrics["begun_at"] >= 5
    assert report.metrics["ended_at"] == report.metrics["begun_at"] + 5
    worlds = [found["world_size"] for found in report.rounds]
    assert 4 in worlds[:-1], "no ranks met again after all four had"
    assert [sorted(found["ranks"]) for found in report.rounds] == [list(range(world)) for world in worlds]
    assert (tmp_path / "out" / "model.txt").read_text() == "trained"
