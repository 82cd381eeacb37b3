"""What a training's page is drawn from: XComs of a DAG run, as its tasks write them."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from manycpu.pipeline.run_report import Report

RunDag = Callable[..., SimpleNamespace]
Written = list[tuple[str, str, dict[str, Any]]]
PLAIN = {"data": None, "model": None, "args": "", "dtype": "fp32", "nproc_per_node": 1, "oversubscribe": True}
TELLS = """
import os
from manycpu.pipeline.node.metrics import metrics, progress
progress(step=3, total_steps=4, loss=0.5)
metrics({"accuracy": 0.25})
open(os.environ["MANYCPU_OUTPUT"] + "/model.txt", "w").write("model")
"""

OWN = """
from airflow.sdk import dag
from manycpu.operators import training_pipeline

@dag(schedule=None)
def own():
    training_pipeline(run={run!r}, default_args={{"retries": 0}})

own()
"""


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Written:
    """Collect XComs as they go to Airflow: task, key and document."""
    from airflow.sdk.execution_time.xcom import XCom

    kept: Written = []
    to_airflow = XCom.set

    def put(key: str, value: Any, **place: Any) -> None:
        to_airflow(key, value, **place)
        if key in ("manycpu_live", "manycpu_report"):
            kept.append((place["task_id"], key, json.loads(json.dumps(value))))

    monkeypatch.setattr(XCom, "set", put)
    return kept


def test_a_run_shows_how_it_goes_and_keeps_its_report(
    run_dag: RunDag, script: Callable[[str], str], tmp_path: Path, written: Written
) -> None:
    conf = PLAIN | {"program": script(TELLS), "output": str(tmp_path / "out"), "env": {"TOKEN": "a secret"}}
    assert run_dag("train", conf=conf).state == "success"
    live = [document for _, key, document in written if key == "manycpu_live"]
    reports = [document for _, key, document in written if key == "manycpu_report"]
    assert {task for task, *_ in written} == {"training.train", "training.cleanup"}
    assert [document["state"] for document in live][-1] == "succeeded"
    assert live[-1]["series"]["accuracy"]["steps"] == [3]
    assert [report["state"] for report in reports] == ["succeeded", "succeeded"], "before and after deletion"
    kept, on_disk = (
        Report.model_validate(report)
        for report in (reports[-1], json.loads((tmp_path / "out" / "report.json").read_text()))
    )
    for name in ("metrics", "series", "ranks", "history"):
        assert getattr(kept, name) == getattr(on_disk, name)
    assert "a secret" not in json.dumps(written)


def test_a_password_of_a_connection_is_in_no_xcom(
    run_dag: RunDag,
    script: Callable[[str], str],
    tmp_path: Path,
    written: Written,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing tells manycpu that this argument is a secret; Airflow knows it."""
    monkeypatch.setenv("AIRFLOW_CONN_DATABASE", "postgres://me:hunter2secret@host/db")
    run = {"program": script(TELLS), "output": str(tmp_path / "out"), "nproc_per_node": 1}
    run["args"] = ["--db", "{{ conn.database.password }}"]
    assert run_dag("own", OWN.format(run=run)).state == "success"
    assert "--db" in json.dumps(written)
    assert "hunter2secret" not in json.dumps(written)


def test_a_refused_run_says_why(run_dag: RunDag, tmp_path: Path, written: Written) -> None:
    conf = PLAIN | {"program": str(tmp_path / "nope.py"), "output": str(tmp_path / "out")}
    assert run_dag("train", conf=conf).state == "failed"
    assert [(task, key) for task, key, _ in written] == [("training.prepare", "manycpu_live")]
    assert "nope.py" in written[0][2]["error"]
