"""DAGs whose runs say what to train and where, in the words of the trigger form."""

from datetime import timedelta
from typing import Any

from airflow.sdk import dag

from manycpu.operators import training_params, training_pipeline

SOON = timedelta(seconds=1)


def form(name: str, **options: Any) -> None:
    @dag(dag_id=name, schedule=None, params=training_params())
    def made() -> None:
        training_pipeline(retry_delay=SOON, **options)

    made()


form("form", retries=1)
form("form_sync", retries=1, deferrable=False)
form("form_hurried", retries=0, execution_timeout=timedelta(seconds=40))
