"""The example DAG that trains on Kubernetes: an MPIJob, with a deferred task."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cluster.space import Space
from support.cluster_runs import succeeded

Fields = dict[str, Any]
RunDag = Callable[..., SimpleNamespace]

pytestmark = pytest.mark.pod_security("restricted")


def test_the_example_fine_tunes_on_both_nodes(
    run_dag: RunDag, connected: Fields, recipe: Fields, namespace: Space, tmp_path: Path
) -> None:
    target, resources = connected | {"launch": "mpijob", "mpi": "intel"}, recipe["resources"]
    conf = {name: recipe[name] for name in ("args", "data", "model", "output")}
    conf |= {"resources_cpu": resources["cpu"], "resources_memory": resources["memory"]}
    conf |= {f"kubernetes_{name}": value for name, value in target.items() if name != "kind"}
    ran = run_dag("train_on_kubernetes", conf=conf)
    assert (ran.state, set(ran.tasks.values())) == ("success", {"success"}), ran.said[-5000:]
    assert "exact_match" in succeeded(tmp_path / "out", namespace).metrics
