"""An Airflow in the cluster, as docs/airflow.md deploys it, and a training of its DAG train_on_kubernetes."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from cluster.command import wait_for
from cluster.fixtures import TestCluster
from cluster.space import Space
from kubernetes import client
from support import airflow_chart, airflow_image
from support.cluster_runs import Fields, succeeded_by, target_fields
from support.standalone_airflow import Airflow

DAG = "train_on_kubernetes"
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


soon = partial(wait_for, seconds=60, every=1)  # not more often: each request loads Airflow's API server


class Deployed:
    """An Airflow in a namespace of its own, which trains in another one."""

    airflow: Airflow

    def __init__(self, place: Space, trainings: Space, target: Fields) -> None:
        self.place, self.trainings, self.target = place.by_admin, trainings.by_admin, target

    def start(self, values: Fields, config: Fields | None = None) -> None:
        """Create all objects, and wait until every component is healthy and the DAG is loaded."""
        repository, _, digest = airflow_image.reference().partition("@")
        values["images"] = {"airflow": {"repository": repository, "digest": digest}}
        values["config"] = {"api": {"workers": 1}, **(config or {})}
        for manifest in (
            *airflow_chart.example_objects(self.place.name, self.trainings.name),
            *airflow_chart.foundation(values, self.place.name),
            airflow_chart.migration(values),
        ):
            self.place.create(manifest)
        soon("the tables", self._is_migrated)
        for manifest in airflow_chart.components(values):
            self.place.create(manifest)
        soon("the API server", self._listens)
        soon("every component", self.is_healthy)
        self.unpause(DAG)

    def unpause(self, dag: str) -> None:
        """Wait until a DAG is loaded, and let its runs begin."""
        soon(
            f"the DAG {dag}",
            lambda: dag in [one["dag_id"] for one in self.airflow.api("GET", "dags")["dags"]],
        )
        self.airflow.api("PATCH", f"dags/{dag}", {"is_paused": False})

    def trigger(self) -> str:
        """Start a training whose ranks wait for the file ``/tmp/go``; return its DAG run."""
        self.put("data/words", "many words")
        self.put("program/train.py", PROGRAM)
        return self.airflow.trigger(DAG, _conf(self.target))

    def ranks(self, run: str) -> dict[str, str]:
        """Wait until the pods of both ranks exist; return them: name -> uid."""

        def found() -> dict[str, str]:
            assert self.airflow.state(run) != "failed"
            pods = {pod.metadata.name: pod.metadata.uid for pod in self.trainings.pods("manycpu/role")}
            return pods if len(pods) > 1 else {}

        return soon("the ranks", found)

    def logged(self, run: str, pattern: str, task: str = "training.train", attempt: int = 2) -> list[str]:
        """Return the log lines of try ``attempt`` of a task that match a pattern; empty: it has not begun."""
        if self.airflow.task(run, task)["try_number"] < attempt:
            return []
        return [line for line in self.airflow.log(run, task, attempt) if re.match(pattern, line)]

    def finish(self, run: str, ranks: dict[str, str], read: Callable[[str], str] | None = None) -> None:
        """Let the ranks end; check that the DAG run succeeds, with one attempt, and leaves nothing.

        Args:
            run: The DAG run.
            ranks: The pods of the ranks at the beginning: they must be the same now.
            read: Reads a file of the output; None: from the volume of models.
        """
        assert self.ranks(run) == ranks
        for rank in ranks:
            self.trainings.wait_pod(rank, "Running")
            self.trainings.run(rank, "touch", "/tmp/go")  # noqa: S108 - inside a pod
        assert self.airflow.end(run, 900) == "success", self._failed(run)
        read = read or (lambda name: self.shell(f"cat {FOLDER}/models/one/{name}"))
        assert read("model.txt") == "many words 2"
        report = succeeded_by(read("report.json"), self.trainings)
        assert report.attempts == 1

    def put(self, path: str, text: str) -> None:
        """Write a file on the volume of models."""
        folder = f"{FOLDER}/{path}".rpartition("/")[0]
        self.shell(f"mkdir -p {folder} && cat > {FOLDER}/{path} <<'END'\n{text}\nEND")

    def shell(self, script: str) -> str:
        """Run a shell script where the volume of models is mounted."""
        (pod,) = self.pods("api-server")
        return self.place.run(pod.metadata.name, "sh", "-c", script)

    def pods(self, component: str) -> list[client.V1Pod]:
        """Return the pods of a component."""
        return self.place.pods(f"component={component}")

    def kill(self, pod: client.V1Pod, grace: int = 0) -> None:
        """Delete a pod after a grace period in seconds; 0: at once, as if its node was lost."""
        self.place.core.delete_namespaced_pod(pod.metadata.name, self.place.name, grace_period_seconds=grace)

    def evict(self, pod: client.V1Pod) -> None:
        """Ask for the eviction of a pod, as a drain of its node does."""
        body = {"metadata": {"name": pod.metadata.name}}
        self.place.core.create_namespaced_pod_eviction(pod.metadata.name, self.place.name, body)

    def replaced(self, pod: client.V1Pod, end: Callable[[client.V1Pod], None]) -> client.V1Pod:
        """End a pod of a component by ``end``; wait until its replacement runs, and return that."""
        component = pod.metadata.labels["component"]
        before = {each.metadata.uid for each in self.pods(component)}
        end(pod)

        def found() -> client.V1Pod | None:
            pods = {each.metadata.uid: each for each in self.pods(component)}
            new = [pods[uid] for uid in pods.keys() - before if pods[uid].status.phase == "Running"]
            return new[0] if new and pod.metadata.uid not in pods else None

        return soon(f"the next pod of {component}", found)

    def is_healthy(self) -> bool:
        try:
            parts = self.airflow.api("GET", "monitor/health")
        except OSError:  # its database is away
            return False
        return all(parts[name]["status"] == "healthy" for name in ("scheduler", "dag_processor", "triggerer"))

    def _failed(self, run: str) -> str:
        """Return the last log of each task that failed."""
        tasks = self.airflow.api("GET", f"{run}/taskInstances")["task_instances"]
        failed = [(task["task_id"], task["try_number"]) for task in tasks if task["state"] == "failed"]
        return "\n".join("\n".join([name, *self.airflow.log(run, name, number)]) for name, number in failed)

    def _is_migrated(self) -> bool:
        jobs = client.BatchV1Api(self.place.admin)
        return bool(jobs.read_namespaced_job("airflow-migrations", self.place.name).status.succeeded)

    def _listens(self) -> bool:
        (pod,) = self.pods("api-server")
        address = f"http://{pod.status.pod_ip}:{airflow_chart.PORT}"
        try:
            self.airflow = Airflow(address, Path("/"), "admin", "admin")
        except (OSError, ValueError):  # there is no pod yet, or it does not listen
            return False
        return True


@pytest.fixture
def deployed(cluster: TestCluster, namespace: Space, second: Space) -> Iterator[Deployed]:
    """Yield an Airflow in the second namespace that may train in the first."""
    yield Deployed(second, namespace, target_fields(cluster, namespace))
    # Deleted first: they would replace the pods while the namespace is deleted.
    apps = client.AppsV1Api(second.admin)
    apps.delete_collection_namespaced_deployment(second.name)
    apps.delete_collection_namespaced_stateful_set(second.name)


def _conf(target: Fields) -> Fields:
    """Return what a person enters into the DAG's form; the connection stays the default."""
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
