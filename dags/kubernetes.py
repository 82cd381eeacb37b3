"""Fine-tune on Kubernetes: the trigger form of `train`, with defaults for two nodes of a cluster.

Fill in the form: the connection, the namespace, and the registry from which the nodes pull images.
"""

from pathlib import Path

from airflow.sdk import dag

from manycpu.operators import training_params, training_pipeline
from manycpu.operators.examples import form_defaults

ON_KUBERNETES = {
    "nnodes": "2",
    "nproc_per_node": 1,
    "spread": "require",
    "resources_cpu": 2,
    "resources_memory": "4Gi",
    "target_kind": "kubernetes",
    "kubernetes_connection": "kubernetes_default",
}


@dag(
    schedule=None,
    params=training_params(form_defaults(Path(__file__).parent) | ON_KUBERNETES),
    tags=["manycpu", "example"],
    doc_md=__doc__,
)
def train_on_kubernetes() -> None:
    training_pipeline()


train_on_kubernetes()
