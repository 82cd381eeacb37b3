"""Jobs in a real Airflow: what becomes of one whose worker is killed or whose task is ended."""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cluster.command import wait_for
from cluster.space import Space
from helpers import until
from kubernetes_jobs import cluster_of
from standalone import Airflow

from manycpu.pipeline.report import Report
from manycpu.pipeline.spec.job_kinds import JOB_KINDS
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.targets.kubernetes.deletion import kinds

PROGRAM = Path(__file__).parents[1] / "e2e" / "programs" / "tiny.py"
GO = "/tmp/go"  # noqa: S108 - inside a pod
WAIT = 180  # seconds: many times what each step takes

pytestmark = [pytest.mark.pod_security("restricted"), pytest.mark.timeout(400)]


@dataclass(frozen=True)
class Training:
    """A DAG run whose task `train` waits for a job with one rank."""

    airflow: Airflow
    namespace: Space
    launch: str
    run: str
    output: Path

    @property
    def task(self) -> dict[str, Any]:
        return self.airflow.task(self.run)

    def job(self, attempt: int = 1) -> KubeObject:
        """Wait until an attempt's job is there."""
        return wait_for(f"attempt {attempt}", lambda: self._jobs(attempt), seconds=WAIT)[0]

    def speaks(self, attempt: int = 1) -> KubeObject:
        """Wait until the rank of an attempt has spoken; returns its job."""
        job = self.job(attempt)
        wait_for("its rank to speak", lambda: "line 2 of" in self._log(job), seconds=WAIT, every=0.3)
        return job

    def waits(self) -> None:
        """Wait until the task is deferred, and the triggerer follows the job."""
        until(lambda: any(re.match("trigger .* starting$", line) for line in self.log()), WAIT)

    def goes_on(self, job: KubeObject) -> None:
        """Let the rank come to its end."""
        self.namespace.run(f"{job['metadata']['name']}-worker-0", "touch", GO)

    def log(self, attempt: int = 1) -> list[str]:
        return self.airflow.log(self.run, attempt=attempt)

    def attaches(self, job: KubeObject) -> None:
        """Wait until the next try waits for a job, which is the same as before."""
        until(lambda: self.task["try_number"] == 2 and self.task["state"] == "running", WAIT)
        name = f"{self.launch} {self.namespace.name}/{job['metadata']['name']}"
        until(lambda: f"attached to attempt 1, {name}" in self.log(attempt=2), WAIT)
        assert self._uid(job) == job["metadata"]["uid"]

    def loses(self, job: KubeObject) -> None:
        """Wait until a job and its pods are gone."""
        until(lambda: self._uid(job) is None and self._pods(job) == [], WAIT)

    def was_ended(self, *by: str) -> None:
        """See that the DAG run failed, and that the report says who ended the training."""
        assert self.airflow.end(self.run, WAIT) == "failed"
        report = self.report()
        assert (report.state, report.left_behind) == ("cancelled", [])
        assert any(words in str(report.error) for words in by), report.error

    def report(self) -> Report:
        return Report.model_validate_json((self.output / "report.json").read_text())

    def _jobs(self, attempt: int) -> list[KubeObject]:
        return cluster_of(self.namespace).list(JOB_KINDS[self.launch].kind, {"manycpu/attempt": str(attempt)})

    def _uid(self, job: KubeObject) -> str | None:
        there = cluster_of(self.namespace).get(job["kind"], job["metadata"]["name"])
        return there["metadata"]["uid"] if there else None

    def _pods(self, job: KubeObject) -> list[Any]:
        labels = job["metadata"]["labels"]
        ours = [f"{name}={labels[name]}" for name in ("manycpu/run", "manycpu/attempt")]
        return self.namespace.pods(",".join([*ours, "manycpu/role"]))

    def _log(self, job: KubeObject) -> str:
        running = [pod.metadata.name for pod in self._pods(job) if pod.status.phase == "Running"]
        return "\n".join(self.namespace.log(name) for name in running)


@pytest.fixture
def connected(airflow: Airflow, target: dict[str, Any], namespace: Space) -> Iterator[dict[str, Any]]:
    """Give the fields of a target that is reached by a connection of this Airflow's."""
    extra = {"kube_config_path": target["connection"], "namespace": namespace.name}
    body = {"connection_id": namespace.name, "conn_type": "kubernetes", "extra": json.dumps(extra)}
    airflow.api("POST", "connections", body)
    yield target | {"connection": namespace.name}
    airflow.api("DELETE", f"connections/{namespace.name}")


@pytest.fixture
def begin(
    airflow: Airflow, connected: dict[str, Any], namespace: Space, tmp_path: Path
) -> Callable[..., list[Training]]:
    """Start a DAG for each of some launch kinds."""

    def start(dag: str, launch: str) -> Training:
        output = tmp_path / launch
        where = {f"kubernetes_{name}": value for name, value in connected.items() if name != "kind"}
        conf = {
            "program": str(PROGRAM),
            "output": str(output),
            "env": {"GO": GO, "TAG": launch},
            "target_kind": "kubernetes",
            **where,
            "kubernetes_launch": launch,
        }
        return Training(airflow, namespace, launch, airflow.trigger(dag, conf), output)

    return lambda dag, *launches: [start(dag, launch) for launch in launches]


@pytest.fixture(autouse=True)
def nothing_left(namespace: Space) -> Iterator[None]:
    """See that nothing that a run owned is left."""
    yield
    ours = {"app.kubernetes.io/managed-by": "manycpu"}
    assert [item for kind in kinds() for item in cluster_of(namespace).list(kind, ours)] == []


def test_a_retry_attaches_to_the_job_of_a_worker_that_was_killed(
    begin: Callable[..., list[Training]],
) -> None:
    trainings = begin("form_sync", *JOB_KINDS)
    jobs = [training.speaks() for training in trainings]
    for training in trainings:
        os.kill(training.task["pid"], signal.SIGKILL)
    for training, job in zip(trainings, jobs, strict=True):
        training.attaches(job)
        training.goes_on(job)
    for training in trainings:
        assert training.airflow.end(training.run, WAIT) == "success"
        assert (training.report().attempts, training.report().left_behind) == (1, [])


def test_marking_the_task_failed_ends_the_job(begin: Callable[..., list[Training]]) -> None:
    trainings = begin("form", *JOB_KINDS)
    jobs = [training.speaks() for training in trainings]
    for training in trainings:
        training.waits()
        training.airflow.mark(training.run, "failed")
    for training, job in zip(trainings, jobs, strict=True):
        training.loses(job)
        # By the triggerer, or by the task that cleans up: Airflow starts both at once.
        training.was_ended("ended by task training.train, try 1", "ended by cleanup")


def test_clearing_the_task_ends_the_job_and_the_next_attempt_follows(
    begin: Callable[..., list[Training]],
) -> None:
    (training,) = begin("form", "pytorchjob")
    job = training.speaks()
    training.waits()
    training.airflow.clear(training.run)
    training.loses(job)
    training.goes_on(training.speaks(attempt=2))
    assert training.airflow.end(training.run, WAIT) == "success"
    assert (training.report().attempts, training.report().left_behind) == (2, [])


def test_the_execution_timeout_of_a_deferred_task_ends_the_job(begin: Callable[..., list[Training]]) -> None:
    (training,) = begin("form_hurried", "pytorchjob")
    job = training.job()
    training.waits()
    training.loses(job)
    training.was_ended("ended by execution_timeout")
    assert training.task["state"] == "failed"
