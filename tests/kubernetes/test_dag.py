"""A DAG run that trains on Kubernetes: each launch kind from the operators, deferred and back."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_bert import tiny_checkpoint, tiny_data

from manycpu.pipeline.report import Report

DAG = """
from airflow.sdk import dag
from manycpu.operators import training_pipeline

@dag(schedule=None)
def cluster():
    for launch, run, target in {groups!r}:
        training_pipeline(run=run, target=target, group_id=launch, default_args={{"retries": 0}})

cluster()
"""

pytestmark = pytest.mark.pod_security("restricted")


@pytest.fixture
def connected(target: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Give the fields of a target that is reached by an Airflow connection."""
    extra = {"kube_config_path": target["connection"], "namespace": target["namespace"]}
    monkeypatch.setenv("AIRFLOW_CONN_CLUSTER", json.dumps({"conn_type": "kubernetes", "extra": extra}))
    return target | {"connection": "cluster"}


@pytest.mark.timeout(600)
def test_a_dag_run_trains_with_each_launch_kind(
    run_dag: Callable[..., SimpleNamespace],
    connected: dict[str, Any],
    a_run: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    groups = [
        (launch, a_run(output=str(tmp_path / launch)), connected | {"launch": launch})
        for launch in ("pytorchjob", "mpijob")
    ]
    ran = run_dag("cluster", DAG.format(groups=groups))
    assert (ran.state, set(ran.tasks.values())) == ("success", {"success"}), ran.said[-5000:]
    for launch, _, _ in groups:
        report = Report.model_validate_json((tmp_path / launch / "report.json").read_text())
        assert (report.world_size, len(report.hosts), report.left_behind) == (2, 2, [])


@pytest.mark.timeout(600)
def test_the_example_fine_tunes_on_both_nodes(
    run_dag: Callable[..., SimpleNamespace], connected: dict[str, Any], tmp_path: Path
) -> None:
    where = {f"kubernetes_{name}": value for name, value in connected.items() if name != "kind"}
    conf = where | {
        "args": "--max_seq_length 48 --doc_stride 8 --per_device_train_batch_size 4",
        "data": str(tiny_data(tmp_path / "data")),
        "model": str(tiny_checkpoint(tmp_path / "model")),
        "output": str(tmp_path / "out"),
        "resources_cpu": 0.6,
        "resources_memory": "1500Mi",
    }
    ran = run_dag("train_on_kubernetes", conf=conf)
    assert (ran.state, set(ran.tasks.values())) == ("success", {"success"}), ran.said[-5000:]
    report = Report.model_validate_json((tmp_path / "out" / "report.json").read_text())
    assert (report.world_size, len(report.hosts), report.left_behind) == (2, 2, [])
    assert "exact_match" in report.metrics
    assert (tmp_path / "out" / "config.json").is_file()
