"""DAG `champion` where something fails: nothing is promoted, nothing stays, and the run says so."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.in_process_airflow import Ran

from manycpu.operators import local_airflow
from manycpu.operators.champion.promotions import champion
from manycpu.operators.champion.versions import write_version


@pytest.mark.usefixtures("home", "no_process_left")
def test_a_failed_candidate_is_passed_over_and_a_failed_evaluation_leaves_nothing(
    run_dag: Callable[..., Ran], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    version = write_version(tmp_path / "data", 50).path
    shutil.copy(f"{version}/train/digits.csv", f"{version}/holdout/digits.csv")
    conf = {"folder": str(tmp_path), "ask": False, "nproc_per_node": 1, "rates": [1e30, 0.3]}
    text = (local_airflow.DAGS / "champion.py").read_text()
    once = text.replace('"retries": 1', '"retries": 0')  # a second try would fail too
    assert once != text
    ran = run_dag("champion", once, conf)
    assert "the training diverged at step" in ran.said
    assert "the candidate of rate 1e+30 failed: the training failed" in caplog.text
    assert ran.tasks["choose"] == "success"
    assert "the model has seen 50 of the 50 rows to evaluate it on" in ran.said
    assert ran.state == "failed"
    assert "the DAG run has no conclusion: task conclude is upstream_failed" in ran.said
    assert champion(tmp_path) is None
    assert list(tmp_path.glob("runs/*")) == []
