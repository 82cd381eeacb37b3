"""An Airflow in the cluster with KubernetesExecutor, as docs/airflow.md deploys it: each task is a pod."""

import pytest
from kubernetes import client
from support import airflow_chart
from support.deployed_airflow import Deployed, soon

TRAIN = "training.train"

pytestmark = pytest.mark.pod_security("restricted")


def test_a_training_outlives_the_pod_of_its_task_and_the_triggerer(
    deployed: Deployed,
) -> None:
    deployed.start(airflow_chart.example_values())
    plugins = deployed.airflow.api("GET", "plugins")["plugins"]
    assert "manycpu" in [plugin["name"] for plugin in plugins]
    run = deployed.trigger()
    ranks = deployed.ranks(run)
    (worker,) = tasks(deployed, TRAIN)
    deployed.kill(worker)
    soon("the retry", lambda: deployed.logged(run, "attached to attempt 1"))

    soon("the trigger", lambda: deployed.logged(run, "trigger .* starting"))
    (triggerer,) = deployed.pods("triggerer")
    deployed.kill(triggerer)
    soon("the next triggerer", lambda: len(deployed.logged(run, "trigger .* starting")) > 1)

    deployed.finish(run, ranks)
    soon("the pods of tasks to be gone", lambda: tasks(deployed) == [])


def tasks(deployed: Deployed, task: str | None = None) -> list[client.V1Pod]:
    """Return the pods of tasks, or of one task."""
    pods = deployed.place.pods("kubernetes_executor=True")
    return [pod for pod in pods if task in (None, pod.metadata.annotations["task_id"])]
