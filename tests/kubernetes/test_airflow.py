"""Jobs in a real Airflow: a person watches one, and a person marks the task of another failed.

All other ends of a run are in tests/e2e.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cluster.command import wait_for
from cluster.space import Space
from support.browser import Page, needs_chromium
from support.handmade_jobs import open_namespace
from support.standalone_airflow import Airflow
from support.training_tab import Tab
from support.waiting import until

from manycpu.pipeline.run_report import Report
from manycpu.pipeline.spec.job_kinds import JOB_KINDS
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.targets.kubernetes.deletion import kinds

TESTS = Path(__file__).parents[1]
SPEAKS = TESTS / "e2e" / "programs" / "tiny.py"
GROWS = TESTS / "ui" / "programs" / "growing.py"
GO = "/tmp/go"  # noqa: S108 - inside a pod
FOLDER = "/tmp"  # noqa: S108 - inside a pod
WAIT = 180  # seconds: many times as long as each step takes

pytestmark = pytest.mark.pod_security("restricted")


@dataclass(frozen=True)
class Training:
    """A DAG run whose task `train` waits for a job with one rank."""

    airflow: Airflow
    namespace: Space
    launch: str
    run: str
    output: Path

    def speaks(self) -> KubeObject:
        """Wait until the rank has printed its second line; return its job."""
        job = wait_for("the job", self._jobs, seconds=WAIT)[0]
        wait_for("its rank to speak", lambda: "line 2 of" in self._log(job), seconds=WAIT, every=0.3)
        return job

    def does(self, job: KubeObject, command: str) -> None:
        """Run a shell command in the pod of the job's only rank."""
        (rank,) = self._running(job)
        self.namespace.by_admin.run(rank, "sh", "-c", command)

    def runs(self) -> KubeObject:
        """Wait until the job's only rank runs; return its job."""
        job = wait_for("the job", self._jobs, seconds=WAIT)[0]
        wait_for("its rank", lambda: self._running(job), seconds=WAIT, every=0.3)
        return job

    def waits(self) -> None:
        """Wait until the task is deferred, and the triggerer follows the job."""
        starting = re.compile("trigger .* starting$")
        until(lambda: any(starting.match(line) for line in self.airflow.log(self.run)), WAIT)

    def loses(self, job: KubeObject) -> None:
        """Wait until a job and its pods are gone."""
        until(lambda: self._uid(job) is None and self._pods(job) == [], WAIT)

    def was_ended(self, *by: str) -> None:
        """Check that the DAG run failed, and that the report says who ended the training."""
        assert self.airflow.end(self.run, WAIT) == "failed"
        report = Report.model_validate_json((self.output / "report.json").read_text())
        assert (report.state, report.left_behind) == ("cancelled", [])
        assert any(words in str(report.error) for words in by), report.error

    def _jobs(self) -> list[KubeObject]:
        return open_namespace(self.namespace).list(JOB_KINDS[self.launch].kind, {"manycpu/attempt": "1"})

    def _uid(self, job: KubeObject) -> str | None:
        there = open_namespace(self.namespace).get(job["kind"], job["metadata"]["name"])
        return there["metadata"]["uid"] if there else None

    def _pods(self, job: KubeObject) -> list[Any]:
        labels = job["metadata"]["labels"]
        ours = [f"{name}={labels[name]}" for name in ("manycpu/run", "manycpu/attempt")]
        return self.namespace.pods(",".join([*ours, "manycpu/role"]))

    def _log(self, job: KubeObject) -> str:
        return "\n".join(self.namespace.log(name) for name in self._running(job))

    def _running(self, job: KubeObject) -> list[str]:
        return [pod.metadata.name for pod in self._pods(job) if pod.status.phase == "Running"]


Begin = Callable[..., Training]


@pytest.fixture
def connection(airflow: Airflow, target: dict[str, Any], namespace: Space) -> Iterator[str]:
    """Create an Airflow connection to the test's namespace; yield its name."""
    extra = {"kube_config_path": target["connection"], "namespace": namespace.name}
    body = {"connection_id": namespace.name, "conn_type": "kubernetes", "extra": json.dumps(extra)}
    airflow.api("POST", "connections", body)
    yield namespace.name
    airflow.api("DELETE", f"connections/{namespace.name}")


@pytest.fixture(autouse=True)
def nothing_left(namespace: Space) -> Iterator[None]:
    """Check that the namespace has no objects of manycpu after the test."""
    yield
    ours = {"app.kubernetes.io/managed-by": "manycpu"}
    assert [item for kind in kinds() for item in open_namespace(namespace).list(kind, ours)] == []


@pytest.fixture
def begin(
    airflow: Airflow, connection: str, target: dict[str, Any], namespace: Space, tmp_path: Path
) -> Begin:
    """Return a function that starts a DAG run, which trains a program in the test's namespace."""

    def begin_(launch: str, program: Path, **env: str) -> Training:
        output = tmp_path / launch
        fields = target | {"connection": connection, "launch": launch}
        where = {f"kubernetes_{name}": value for name, value in fields.items() if name != "kind"}
        conf = {"program": str(program), "output": str(output), "env": env}
        run = airflow.trigger("form", conf | {"target_kind": "kubernetes"} | where)
        return Training(airflow, namespace, launch, run, output)

    return begin_


def test_marking_the_task_failed_ends_the_job(begin: Begin) -> None:
    trainings = [begin(launch, SPEAKS, GO=GO, TAG=launch) for launch in JOB_KINDS]
    jobs = [training.speaks() for training in trainings]
    for training in trainings:
        training.waits()
        training.airflow.mark(training.run, "failed")
    for training, job in zip(trainings, jobs, strict=True):
        training.loses(job)
        # Either the triggerer ends the job, or the clean-up task: Airflow starts both at once.
        training.was_ended("ended by task training.train, try 1", "ended by cleanup")


@pytest.mark.long  # on this machine: ui/test_training_page
@needs_chromium
def test_a_jobs_curve_grows_while_the_task_is_deferred(airflow: Airflow, begin: Begin, page: Page) -> None:
    training = begin("pytorchjob", GROWS, FOLDER=FOLDER)
    job = training.runs()
    training.does(job, f"echo 3 > {FOLDER}/steps")
    tab = Tab(airflow, page)
    tab.enter()
    tab.open(training.run)
    tab.shows("step 3 of 100", WAIT)
    training.waits()
    training.does(job, f"echo 7 > {FOLDER}/steps")
    tab.shows("step 7 of 100", WAIT)
    assert airflow.task(training.run)["state"] == "deferred"
    training.does(job, f"touch {FOLDER}/end")
    tab.shows("succeeded", WAIT)
    assert airflow.end(training.run, WAIT) == "success"
    report = Report.model_validate_json((training.output / "report.json").read_text())
    assert report.series["loss"].steps == [*range(1, 8)]
    assert page.complaints() == []
