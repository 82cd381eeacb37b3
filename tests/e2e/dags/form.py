"""A DAG whose runs say what to train and where, in the words of the trigger form."""

from datetime import timedelta

from airflow.sdk import dag

from manycpu.operators import training_params, training_pipeline


@dag(schedule=None, params=training_params())
def form() -> None:
    training_pipeline(retries=1, retry_delay=timedelta(seconds=1))


form()
