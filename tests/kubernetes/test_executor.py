"""An Airflow in the cluster with KubernetesExecutor, as docs/airflow.md deploys it: each task is a pod."""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cluster.command import wait_for
from cluster.space import Space
from kubernetes import client
from support import airflow_chart, airflow_image
from support.cluster_runs import succeeded_by
from support.standalone_airflow import Airflow

DAG = "train_on_kubernetes"
TRAIN = "training.train"
FOLDER = "/mnt/manycpu"
PROGRAM = """
import os, sys, time, torch, torch.distributed as dist
from pathlib import Path
dist.init_process_group()
while not Path("/tmp/go").exists():
    time.sleep(0.1)
total = torch.ones(1)
dist.all_reduce(total)
if dist.get_rank() == 0:
    words = Path(sys.argv[1], "words").read_text().strip()
    Path(os.environ["MANYCPU_OUTPUT"], "model.txt").write_text(f"{words} {int(total)}")
dist.destroy_process_group()
"""

pytestmark = pytest.mark.pod_security("restricted")


soon = partial(wait_for, seconds=60, every=1)  # each question costs Airflow's API server some time


class Deployed:
    """An Airflow in a namespace of its own, which may train in another one."""

    def __init__(self, place: Space, trainings: Space) -> None:
        self.place, self.trainings = place.by_admin, trainings.by_admin
        repository, _, digest = airflow_image.reference().partition("@")
        self.values = airflow_chart.example_values()
        self.values["images"] = {"airflow": {"repository": repository, "digest": digest}}
        self.values["config"] = {"api": {"workers": 1}}

    def start(self) -> Airflow:
        """Create all objects, and wait until every component works and the DAG is there."""
        for manifest in (
            *airflow_chart.example_objects(self.place.name, self.trainings.name),
            *airflow_chart.foundation(self.values, self.place.name),
            airflow_chart.migration(self.values),
        ):
            self.place.create(manifest)
        soon("the tables", self._is_migrated)
        for name in airflow_chart.COMPONENTS:
            self.place.create(airflow_chart.component(self.values, name))
        soon("the API server", self._listens)
        airflow = self._airflow()
        soon("every component", lambda: _is_healthy(airflow))
        soon("the DAG", lambda: _has_dag(airflow))
        airflow.api("PATCH", f"dags/{DAG}", {"is_paused": False})
        return airflow

    def shell(self, script: str) -> str:
        """Run a shell script where the volume of models is mounted."""
        return self.place.run(self.pod("api-server").metadata.name, "sh", "-c", script)

    def kill(self, pod: client.V1Pod) -> None:
        """Delete a pod at once, as the loss of its node does."""
        self.place.core.delete_namespaced_pod(pod.metadata.name, self.place.name, grace_period_seconds=0)

    def tasks(self, task: str | None = None) -> list[client.V1Pod]:
        """Return the pods of tasks, or of one task."""
        pods = self.place.pods("kubernetes_executor=True")
        return [pod for pod in pods if task in (None, pod.metadata.annotations["task_id"])]

    def pod(self, component: str) -> client.V1Pod:
        """Return the only pod of a component."""
        (pod,) = self.place.pods(f"component={component}")
        return pod

    def _is_migrated(self) -> bool:
        jobs = client.BatchV1Api(self.place.admin)
        return bool(jobs.read_namespaced_job("airflow-migrations", self.place.name).status.succeeded)

    def _listens(self) -> bool:
        try:
            return bool(self._airflow())
        except (OSError, ValueError):  # there is no pod yet, or it does not listen
            return False

    def _airflow(self) -> Airflow:
        address = self.pod("api-server").status.pod_ip
        return Airflow(f"http://{address}:{airflow_chart.PORT}", Path("/"), "admin", "admin")


@pytest.fixture
def deployed(namespace: Space, second: Space) -> Iterator[Deployed]:
    """Yield an Airflow in the second namespace that may train in the first."""
    yield Deployed(second, namespace)
    # Else they would replace the pods that are deleted with the namespace.
    client.AppsV1Api(second.admin).delete_collection_namespaced_deployment(second.name)


def _is_healthy(airflow: Airflow) -> bool:
    parts = airflow.api("GET", "monitor/health")
    return all(parts[name]["status"] == "healthy" for name in ("scheduler", "dag_processor", "triggerer"))


def _has_dag(airflow: Airflow) -> bool:
    return DAG in [dag["dag_id"] for dag in airflow.api("GET", "dags")["dags"]]


def test_a_training_outlives_the_pod_of_its_task_and_the_triggerer(
    deployed: Deployed, namespace: Space, target: dict[str, Any]
) -> None:
    airflow = deployed.start()
    assert "manycpu" in [plugin["name"] for plugin in airflow.api("GET", "plugins")["plugins"]]
    deployed.shell(f"mkdir -p {FOLDER}/program {FOLDER}/data && echo many words > {FOLDER}/data/words")
    deployed.shell(f"cat > {FOLDER}/program/train.py <<'END'\n{PROGRAM}\nEND")
    run = airflow.trigger(DAG, conf_of(target))

    def started() -> dict[str, str]:
        assert airflow.state(run) != "failed"
        return pods_of(namespace)

    ranks = soon("the ranks", started)
    (worker,) = deployed.tasks(TRAIN)
    deployed.kill(worker)
    soon("the retry", lambda: logged(airflow, run, "attached to attempt 1"))

    soon("the trigger", lambda: logged(airflow, run, "trigger .* starting"))
    deployed.kill(deployed.pod("triggerer"))
    soon("the next triggerer", lambda: len(logged(airflow, run, "trigger .* starting")) > 1)

    assert pods_of(namespace) == ranks
    for rank in ranks:
        namespace.wait_pod(rank, "Running")
        namespace.by_admin.run(rank, "touch", "/tmp/go")  # noqa: S108 - inside a pod
    assert airflow.end(run) == "success"
    assert deployed.shell(f"cat {FOLDER}/models/one/model.txt") == "many words 2"
    report = succeeded_by(deployed.shell(f"cat {FOLDER}/models/one/report.json"), namespace)
    assert report.attempts == 1
    soon("the pods of tasks to be gone", lambda: deployed.tasks() == [])


def conf_of(target: dict[str, Any]) -> dict[str, Any]:
    """Return what a person enters into the form of the DAG, whose connection is the default."""
    where = {name: value for name, value in target.items() if name not in ("kind", "connection")}
    return {
        "program": f"{FOLDER}/program/train.py",
        "args": ["{data}"],
        "data": f"{FOLDER}/data",
        "output": f"{FOLDER}/models/one",
        "resources_cpu": 0.5,
        "resources_memory": "1Gi",
        "kubernetes_launch": "pytorchjob",
        **{f"kubernetes_{name}": value for name, value in where.items()},
    }


def pods_of(namespace: Space) -> dict[str, str]:
    """Return the pods of both ranks: name -> uid; nothing until both exist."""
    found = {pod.metadata.name: pod.metadata.uid for pod in namespace.pods("manycpu/role")}
    return found if len(found) > 1 else {}


def logged(airflow: Airflow, run: str, pattern: str) -> list[str]:
    """Return the lines of the second try of the training's task that match a pattern."""
    if airflow.task(run)["try_number"] < 2:
        return []
    return [line for line in airflow.log(run, attempt=2) if re.match(pattern, line)]
