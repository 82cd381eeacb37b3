"""Train what the trigger form describes."""

from pathlib import Path

from airflow.sdk import dag

from manycpu.operators import training_params, training_pipeline
from manycpu.operators.examples import form_defaults


@dag(
    schedule=None,
    params=training_params(form_defaults(Path(__file__).parent)),
    tags=["manycpu"],
    doc_md="Train what the trigger form describes. Its defaults train for about a minute on two cores.",
)
def train() -> None:
    training_pipeline()


train()
