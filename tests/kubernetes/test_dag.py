"""A DAG run that trains on Kubernetes: each launch kind from the operators, deferred and back."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cluster.fixtures import TestCluster
from cluster.space import Space
from kubernetes_runs import DAG, ENOUGH, fields_of, succeeded

Fields = dict[str, Any]
RunDag = Callable[..., SimpleNamespace]

pytestmark = [pytest.mark.pod_security("restricted"), pytest.mark.timeout(600)]


def test_a_dag_run_trains_with_each_launch_kind(
    run_dag: RunDag,
    connected: Fields,
    a_run: Callable[..., Fields],
    cluster: TestCluster,
    namespace: Space,
    tmp_path: Path,
) -> None:
    groups = []
    for launch in ENOUGH:
        where, how = fields_of(launch, cluster)
        groups.append((launch, a_run(output=str(tmp_path / launch), **how), connected | where))
    ran = run_dag("cluster", DAG.format(groups=groups))
    assert (ran.state, set(ran.tasks.values())) == ("success", {"success"}), ran.said[-5000:]
    for launch in ENOUGH:
        succeeded(tmp_path / launch, namespace)


@pytest.mark.parametrize("launch", ENOUGH)
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
