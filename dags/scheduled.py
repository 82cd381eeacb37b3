"""Train every week once the DAG is unpaused. Airflow renders templates in the run for each DAG run.

The training runs on this machine and needs the extras `train` and `demo`.
"""

from airflow.sdk import dag

from manycpu.operators import training_pipeline
from manycpu.operators.examples import example_run


@dag(
    schedule="@weekly",
    catchup=False,
    max_active_runs=1,
    is_paused_upon_creation=True,  # else Airflow runs the last week at once
    tags=["manycpu", "example"],
    doc_md=__doc__,
)
def weekly_training() -> None:
    training_pipeline(run=example_run("weekly"))


weekly_training()
