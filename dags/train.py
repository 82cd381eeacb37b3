"""Train what the trigger form says."""

from airflow.sdk import dag

from manycpu.operators import training_params, training_pipeline


@dag(schedule=None, params=training_params(), tags=["manycpu"], doc_md=__doc__)
def train() -> None:
    training_pipeline()


train()
