"""``@task.manycpu``: functions of DAG files that train, in this process, each a whole run in one task."""

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

RunDag = Callable[..., SimpleNamespace]
pytestmark = pytest.mark.usefixtures("home", "no_process_left", "light_torch")

SWEEP = """
import os
from pathlib import Path
from airflow.sdk import dag, task

STEPS = 2 * 2

def written(folder, name):
    return Path(folder, name)

@dag(schedule=None)
def sweep():
    @task
    def rates():
        return [0.1, 0.2]

    @task.manycpu(nnodes=1, nproc_per_node=1, retries=0)
    def fit(data, lr, output, checkpoints, note="", *, more=()):
        from manycpu.pipeline.node.metrics import metrics
        written(output, "model").write_text(f"{lr} {Path(data).read_text()}")
        assert Path(checkpoints).is_dir()
        metrics({"lr": lr})
        return {"lr": lr, "steps": STEPS, "data": Path(data).read_text(), "note": note, "run": os.environ["MANYCPU_RUN"]}

    @task
    def best(results):
        from pathlib import Path
        import json
        Path("FOLDER", "best.json").write_text(json.dumps(list(results)))

    fitted = fit.override(max_active_tis_per_dag=1).partial(data="../data.txt", note="in {{ dag.dag_id }} {model}", output="../models/{{ ti.map_index }}").expand(lr=rates())
    best(fitted)

sweep()
"""


def test_a_sweep_is_runs_of_their_own(run_dag: RunDag, tmp_path: Path, home: Path) -> None:
    (tmp_path / "data.txt").write_text("digits")
    ran = run_dag("sweep", SWEEP.replace("FOLDER", str(tmp_path)))
    print(ran.said)
    assert ran.state == "success"
    results = json.loads((tmp_path / "best.json").read_text())
    print(results, list(home.rglob("*")))
    assert 0
