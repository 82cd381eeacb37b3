"""A DAG run that trains on Kubernetes: each launch kind from the operators, deferred and back."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

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


@pytest.mark.timeout(600)
def test_a_dag_run_trains_with_each_launch_kind(
    run_dag: Callable[..., SimpleNamespace],
    target: dict[str, Any],
    a_run: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    extra = {"kube_config_path": target["connection"], "namespace": target["namespace"]}
    monkeypatch.setenv("AIRFLOW_CONN_CLUSTER", json.dumps({"conn_type": "kubernetes", "extra": extra}))
    where = target | {"connection": "cluster"}
    groups = [
        (launch, a_run(output=str(tmp_path / launch)), where | {"launch": launch})
        for launch in ("pytorchjob", "mpijob")
    ]
    ran = run_dag("cluster", DAG.format(groups=groups))
    assert (ran.state, set(ran.tasks.values())) == ("success", {"success"}), ran.said[-5000:]
    for launch, _, _ in groups:
        report = Report.model_validate_json((tmp_path / launch / "report.json").read_text())
        assert (report.world_size, len(report.hosts), report.left_behind) == (2, 2, [])
