"""A DAG for the tests that trains for each partition of a day; Airflow 3.1 has none and cannot load it."""

from datetime import timedelta
from pathlib import Path

from airflow.sdk import CronPartitionTimetable, dag

from manycpu.operators import training_pipeline

TESTS = Path(__file__).parents[2]


# A DAG with a schedule needs a value for each of its parameters.
@dag(schedule=CronPartitionTimetable("0 0 * * *", timezone="UTC"), params={"folder": ""}, catchup=False)
def tiny_days() -> None:
    training_pipeline(
        run={
            "program": str(TESTS / "e2e" / "programs" / "tiny.py"),
            "output": "{{ params.folder }}/{{ partition_key }}",
            "env": {
                "GO": "{{ params.folder }}/go",
                "TAG": "{{ dag.dag_id }}",
                "PYTHONPATH": f"{TESTS}/scripts/light_torch:{TESTS.parent}/.dev",
            },
        },
        retries=1,
        retry_delay=timedelta(seconds=1),
    )


tiny_days()
