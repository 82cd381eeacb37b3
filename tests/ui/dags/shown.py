"""DAGs for the tests of a training's page: trainings that are only told of, one that trains, and none."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import Param, dag, get_current_context, task, task_group

from manycpu.operators import TrainOperator, training_pipeline
from manycpu.operators.champion import steps

TESTS = Path(__file__).parents[2]
PARAMS = {"folder": Param(type="string")}


def _document(name: str, state: str, points: int) -> dict[str, Any]:
    values = [2.0 / (1 + 0.2 * step) for step in range(points)]
    series = {
        "index": list(range(points)),
        "steps": [10 * step for step in range(points)],
        "times": [time.time() + step for step in range(points)],
        "values": values,
    }
    return {
        "schema_version": 1,
        "key": name,
        "name": name,
        "state": state,
        "attempts": 1,
        "run": {"program": "train.py", "nnodes": 2, "nproc_per_node": 1, "backend": "gloo", "dtype": "bf16"},
        "target": {"kind": "local"},
        "world_size": 2,
        "hosts": ["node-a", "node-b"],
        "progress": {"step": 10 * points, "total_steps": 1000, "epoch": 1.0, "seconds_left": 60},
        "metrics": {"loss": values[-1], "<img src=x onerror=alert(1)>": 1.0},
        "series": {"loss": series, "<img src=x onerror=alert(1)>": series},
        "time": time.time(),
    }


@task
def tell(document: Any, key: str = "manycpu_live") -> None:
    get_current_context()["ti"].xcom_push(key, document)


@dag(schedule=None)
def shown() -> None:
    @task_group
    def pair() -> None:
        tell.override(task_id="train")(_document("pair-1", "running", 20))
        tell.override(task_id="cleanup")(_document("pair-1", "succeeded", 40), "manycpu_report")

    pair()
    tell.override(task_id="fits").partial(key="manycpu_report").expand(
        document=[_document(f"fits-{number}", "succeeded", 10 + number) for number in range(2)]
    )
    tell.override(task_id="elsewhere")("s3://bucket/of/a/backend")


@dag(schedule=None)
def hidden() -> None:
    tell(_document("secret", "succeeded", 5), "manycpu_report")


@dag(schedule=None)
def foreign() -> None:
    @task
    def nothing() -> None: ...

    nothing()


@dag(schedule=None, params=PARAMS)
def growing() -> None:
    training_pipeline(
        run={
            "program": str(TESTS / "ui" / "programs" / "growing.py"),
            "output": "{{ params.folder }}/output",
            "env": {
                "FOLDER": "{{ params.folder }}",
                "PYTHONPATH": f"{TESTS}/scripts/light_torch:{TESTS.parent}/.dev",  # no test is about torch
            },
        },
        retries=1,
        retry_delay=timedelta(seconds=1),
    )


@dag(schedule=None, params={"threshold": 0.0})
def asking() -> None:
    """Ask for approval as DAG `champion` does, of a model that nothing has trained."""
    common = {"rate": 0.3, "path": "/models/candidate", "sha256": "0" * 64, "accuracy": 0.9}
    tried = common | {"training": "candidate.fit", "map_index": 0, "key": "x", "metrics": {}}
    judged = [{"accuracy": 0.875, "rows": 8}]
    compared: Any = task(multiple_outputs=True)(steps.compare)([common | {"data": "v0001"}], judged, [tried])
    ApprovalOperator(
        task_id="approve",
        subject="Is this model to be the champion?",
        body=compared["body"],
        defaults="Reject",
    )


@dag(schedule=None, is_paused_upon_creation=True)
def waiting() -> None:
    TrainOperator(task_id="train", run={"program": "train.py"})


shown()
hidden()
foreign()
growing()
asking()
waiting()
