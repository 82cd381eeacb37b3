"""The package's DAG that trains on Kubernetes: one of each operator's jobs, deferred and back."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cluster.fixtures import TestCluster
from cluster.space import Space
from support.cluster_runs import fields_of, succeeded

Fields = dict[str, Any]
RunDag = Callable[..., SimpleNamespace]

pytestmark = [pytest.mark.pod_security("restricted"), pytest.mark.timeout(600)]


@pytest.mark.parametrize("launch", ["elastic", "intel"])
def test_the_example_fine_tunes_on_both_nodes(
    launch: str,
    run_dag: RunDag,
    connected: Fields,
    recipe: Fields,
    cluster: TestCluster,
    namespace: Space,
    tmp_path: Path,
) -> None:
    where, how = fields_of(launch, cluster)
    run, resources = recipe | how, recipe["resources"]
    conf = {name: run[name] for name in ("args", "data", "model", "output")}
    conf |= {"resources_cpu": resources["cpu"], "resources_memory": resources["memory"]}
    conf |= {name: str(value) if name == "nnodes" else value for name, value in how.items()}
    conf |= {f"kubernetes_{name}": value for name, value in (connected | where).items() if name != "kind"}
    ran = run_dag("train_on_kubernetes", conf=conf)
    assert (ran.state, set(ran.tasks.values())) == ("success", {"success"}), ran.said[-5000:]
    assert "exact_match" in succeeded(tmp_path / "out", namespace).metrics
