"""DAGs for the tests: trainings of one process that do what the test's files say."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import Asset, Param, dag, task

from manycpu.operators import training_pipeline

MODEL = Asset("tiny-model")
TESTS = Path(__file__).parents[2]
RUN: dict[str, Any] = {
    "program": str(TESTS / "e2e" / "programs" / "tiny.py"),
    "output": "{{ params.folder }}/output",
    "env": {
        "GO": "{{ params.folder }}/go",
        "TAG": "{{ dag.dag_id }}",
        "PYTHONPATH": f"{TESTS}/scripts/light_torch:{TESTS.parent}/.dev",  # no test here is about torch
    },
}
PARAMS = {"folder": Param(type="string")}
FAST: dict[str, Any] = {"retries": 1, "retry_delay": timedelta(seconds=1)}


@dag(schedule=None, params=PARAMS)
def tiny() -> None:
    training_pipeline(run=RUN, asset=MODEL, **FAST)


@dag(schedule=None, params=PARAMS)
def tiny_sync() -> None:
    training_pipeline(run=RUN, deferrable=False, **FAST | {"retries": 2})


@dag(schedule=None, params=PARAMS)
def tiny_hurried() -> None:
    training_pipeline(run=RUN, retries=0, execution_timeout=timedelta(seconds=30))


@dag(schedule=MODEL)
def tiny_consumer() -> None:
    @task
    def use(triggering_asset_events: Any = None) -> None:
        extra = triggering_asset_events[MODEL][-1].extra
        text = (
            f"{extra['metrics']['answer']} {Path(extra['path'], 'model.txt').read_text()} {extra['sha256']}"
        )
        Path(os.environ["MANYCPU_TEST_HOME"], "consumed").write_text(text)

    use()


@dag(schedule=None, params=PARAMS)
def tiny_function() -> None:
    @task.manycpu(env={"PYTHONPATH": RUN["env"]["PYTHONPATH"]}, **FAST)
    def fit(folder: str) -> dict[str, str]:
        import time

        from manycpu.pipeline.node.metrics import progress

        progress(step=3, total_steps=4, loss=0.5, seconds_left=3600)
        while not Path(folder, "go").exists():
            time.sleep(0.1)
        return {"went": "on", "in": folder}

    fit("{{ params.folder }}")


tiny()
tiny_function()
tiny_sync()
tiny_hurried()
tiny_consumer()
