"""A model as an asset: one DAG trains it, another starts when there is a new one and reads its metrics.

The training runs on this machine and needs the extras `train` and `demo`.
"""

from typing import Any

from airflow.sdk import Asset, dag, task

from manycpu.operators import training_pipeline
from manycpu.operators.examples import example_run

MODEL = Asset("question-answering-model")
GOOD_ENOUGH = 50  # per cent of the answers that must be exact


@dag(schedule=None, tags=["manycpu", "example"], doc_md=__doc__)
def train_model() -> None:
    training_pipeline(run=example_run("asset"), asset=MODEL)


@dag(schedule=MODEL, tags=["manycpu", "example"], doc_md=__doc__)
def judge_model() -> None:
    @task
    def judge(triggering_asset_events: Any = None) -> dict[str, Any]:
        """Return the newest model; fail if its exact match is too low."""
        newest = triggering_asset_events[MODEL][-1].extra
        exact_match = newest["metrics"]["exact_match"]
        if exact_match < GOOD_ENOUGH:
            raise ValueError(f"{newest['path']}: exact match {exact_match:.1f}, needed {GOOD_ENOUGH}")
        return {"path": newest["path"], "sha256": newest["sha256"], "exact_match": exact_match}

    judge()


train_model()
judge_model()
