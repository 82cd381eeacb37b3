"""What stays of a training by Airflow's tasks: after it failed, and where its worker was killed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from manycpu.operators import local_airflow

RunDag = Callable[..., SimpleNamespace]
pytestmark = pytest.mark.usefixtures("home", "light_torch", "no_process_left")
FAULT_AT = Path(__file__).parents[1] / "scripts" / "fault_at.py"
WHEN = datetime(2026, 1, 1, tzinfo=UTC)

RETURNS = 'return {"accuracy": 0.5}'
WHOLE = """
from airflow.sdk import dag, task

@dag(schedule=None)
def NAME():
    @task.manycpu(nproc_per_node=1, retries=0, output="../out")
    def fit(output, folder="FOLDER"):
        import pathlib
        pathlib.Path(folder, "history").open("a").write("trained\\n")
        pathlib.Path(output, "model.txt").write_text("the model")
        return {"accuracy": 0.5}
    fit()

NAME()
"""
OWN = """
from airflow.sdk import dag
from manycpu.operators import training_pipeline

@dag(schedule=None)
def kept():
    training_pipeline(run={run!r}, default_args={{"retries": 0}})

kept()
"""
SAVES = """
import os, sys
checkpoint = os.environ["MANYCPU_CHECKPOINTS"] + "/checkpoint-1"
output = os.environ["MANYCPU_OUTPUT"] + "/model.txt"
if os.path.exists(checkpoint):
    open(output, "w").write("after " + open(checkpoint).read())
else:
    open(checkpoint, "w").write("a day of work")
    open(output, "w").write("half of a model")
    sys.exit(3)
"""


def report(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "report.json").read_text()))


@pytest.mark.parametrize(
    ("name", "pattern", "end"),
    [
        ("deletes_files", r"os.remove (ledger|lease)\.json", RETURNS),
        pytest.param(
            *("writes_the_report", r"open \S*/out/\.?report\.json", RETURNS),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *("ends_itself", r"os.remove (ledger|lease)\.json", "import os; os._exit(0)"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_killed_while_it_cleans_up_the_task_only_finishes_that(
    run_dag: RunDag, tmp_path: Path, home: Path, name: str, pattern: str, end: str
) -> None:
    """The model is exported and verified: the next try trains no second time, and has the result.

    A function that ended its process itself has none, and fails its task.
    """
    text = WHOLE.replace("NAME", name).replace("FOLDER", str(tmp_path)).replace(RETURNS, end)
    folder = tmp_path / "dags"
    folder.mkdir()
    (folder / "file.py").write_text(text)
    variable = "AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_CONFIG_LIST"
    bundles = local_airflow.settings(tmp_path, dags={"tests": folder})[variable]
    command = [sys.executable, str(FAULT_AT), "kill-begun", pattern, "1"]
    command += ["dag", str(folder), name, WHEN.isoformat()]
    env = os.environ | {variable: bundles}
    killed = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    assert (tmp_path / "out" / "model.txt").read_text() == "the model"

    ran, returns = run_dag(name, text, when=WHEN), end == RETURNS
    assert ran.state == ("success" if returns else "failed"), ran.said
    assert ("rank 0 returned nothing" in ran.said) is not returns
    assert (tmp_path / "history").read_text() == "trained\n"
    written = report(tmp_path / "out")
    assert (written["state"], written["attempts"]) == ("succeeded", 1)
    assert written["returned"] == ({"accuracy": 0.5} if returns else None)
    assert list((home / "runs").iterdir()) == []


def test_of_a_failed_training_output_and_checkpoints_stay_and_the_cleared_task_goes_on(
    run_dag: RunDag, script: Callable[..., str], tmp_path: Path, home: Path
) -> None:
    run = {"program": script(SAVES), "output": str(tmp_path / "out"), "nproc_per_node": 1}
    ran = run_dag("kept", OWN.format(run=run), when=WHEN)
    expected = {"train": "failed", "export": "upstream_failed", "cleanup": "success", "report": "failed"}
    assert ran.tasks | expected == ran.tasks
    (folder,) = (path for path in (home / "runs").iterdir() if path.is_dir())
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {"checkpoints/checkpoint-1", "attempts/1/output/model.txt"} <= files
    assert not [file for file in files if "code" in file]
    written = report(tmp_path / "out")
    assert (written["state"], written["left_behind"]) == ("failed", [])
    assert {Path(path).name for path in written["kept"]} >= {"checkpoints"}
    for path in written["kept"]:
        assert f"kept: {path}" in ran.said
    assert f"manycpu clean {folder.name} --delete-model" in ran.said
    assert "cleared" in ran.said

    again = run_dag("kept", OWN.format(run=run), when=WHEN)
    assert again.state == "success", again.said
    assert (tmp_path / "out" / "model.txt").read_text() == "after a day of work"
    assert list((home / "runs").iterdir()) == []
