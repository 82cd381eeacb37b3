"""An Airflow in the cluster with CeleryExecutor, as docs/airflow.md has it: parts are lost, DAGs change."""

import json
import os
import random
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import pytest
from cluster.faults import Faults
from cluster.fixtures import TestCluster
from support import airflow_chart, s3_server
from support.deployed_airflow import FOLDER, PROGRAM, Deployed, soon
from support.s3_server import Server
from support.s3fs_images import images_with_s3fs

SEED: Final = "MANYCPU_TEST_SEED"
"""Environment variable: the seed of a failed test, which repeats its order."""
WORKERS: Final = {"celery": {"worker_concurrency": 2}}
# Airflow's defaults are five minutes, in which the training continues.
IN_A_MINUTE: Final = {"task_instance_heartbeat_timeout": 60, "orphaned_tasks_check_interval": 60}
ON_S3: Final = {
    "remote_logging": True,
    "remote_base_log_folder": "s3://logs/airflow",
    "remote_log_conn_id": "logs",
}
LOGGED: Final = [
    ("prepare", "log", "run .* is ready"),
    ("train", "log", "launched attempt 1"),
    ("train", r"log\.trigger\.\d+\.log", r"\[rank 0 .* exit: code 0"),
    ("export", "log", ".* manifest sha256"),
]
"""Tasks, the ending of one of their logs, and a line in it."""
REPOSITORY: Final = f"{FOLDER}/repository"
BUNDLES: Final = [
    {"name": "dags-folder", "classpath": "airflow.dag_processing.bundles.local.LocalDagBundle", "kwargs": {}},
    {
        "name": "git",
        "classpath": "airflow.providers.git.bundles.git.GitDagBundle",
        "kwargs": {"tracking_ref": "main", "repo_url": REPOSITORY},
    },
]
# Each pod has its DAGs in a folder of its own name.
FOLDERS: Final = [
    {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
    {"name": "AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_STORAGE_PATH", "value": "/tmp/$(POD)"},  # noqa: S108 - inside pods
]
DAG_FILE: Final = """
from datetime import datetime
from airflow.sdk import dag
from manycpu.operators import training_pipeline

@dag(schedule="@once", start_date=datetime(2026, 1, 1))
def from_git():
    training_pipeline(run={run!r}, target={target!r})

from_git()
"""
RUN: Final = {
    "program": "./train.py",
    "args": ["{data}"],
    "data": f"{FOLDER}/data",
    "output": "s3://models/one",
    "env_from": ["storage"],
    "nnodes": 2,
    "spread": "require",
    "resources": {"cpu": 0.5, "memory": "1Gi"},
}

pytestmark = [pytest.mark.pod_security("restricted"), pytest.mark.timeout(3600)]


@dataclass(frozen=True)
class Losses:
    """The parts of an Airflow that are lost while it trains; each returns once Airflow has recovered."""

    deployed: Deployed
    faults: Faults
    run: str
    chance: random.Random

    def worker(self) -> None:
        """Kill the worker that runs the task; Airflow tries again, and attaches to the training."""
        task = self.deployed.airflow.task(self.run)
        assert (task["state"], task["try_number"]) == ("running", 1)
        pod = self.deployed.place.pod(_pod_name(task["hostname"]))
        self.deployed.replaced(pod, self.deployed.kill)
        soon("the retry", lambda: self.deployed.logged(self.run, "attached to attempt 1"))

    def node(self) -> None:
        """Drain the node of the worker that runs the task, or has run it before it was deferred."""
        pod = self.deployed.place.pod(_pod_name(self.deployed.airflow.task(self.run)["hostname"]))
        with self.faults.cordoned(pod.spec.node_name):
            new = self.deployed.replaced(pod, self.deployed.evict)
        assert new.spec.node_name != pod.spec.node_name

    def triggerer(self) -> None:
        """Kill the triggerer that follows the training; the other one continues."""
        starts = partial(self.deployed.logged, self.run, "trigger .* starting")
        before = len(soon("the trigger", starts))
        holder = self.deployed.airflow.task(self.run)["triggerer_job"]["hostname"]
        self.deployed.replaced(self.deployed.place.pod(_pod_name(holder)), self.deployed.kill)
        soon("the next triggerer", lambda: len(starts()) > before)

    def scheduler(self) -> None:
        """Kill one of the schedulers."""
        pod = self.chance.choice(self.deployed.pods("scheduler"))
        self.deployed.replaced(pod, self.deployed.kill)

    def postgresql(self) -> None:
        """Kill the database, which recovers from its volume."""
        (pod,) = self.deployed.pods("postgresql")
        new = self.deployed.replaced(pod, partial(self.deployed.kill, grace=1))
        read = partial(self.deployed.place.log, new.metadata.name)
        soon("the recovery", lambda: "database system is ready to accept connections" in read())
        assert "automatic recovery in progress" in read()
        soon("every component", self.deployed.is_healthy)


@pytest.mark.alone
def test_a_training_outlives_every_part_of_its_airflow(deployed: Deployed, faults: Faults) -> None:
    seed = os.environ.get(SEED) or secrets.token_hex(4)
    chance = random.Random(seed)  # noqa: S311 - to be repeated
    deployed.start(airflow_chart.celery_values(), WORKERS | {"scheduler": IN_A_MINUTE})
    run = deployed.trigger()
    losses = Losses(deployed, faults, run, chance)
    others = [losses.node, losses.triggerer, losses.scheduler, losses.postgresql]
    # Its task is in a worker only for the first seconds of a try.
    order: list[Callable[[], None]] = [losses.worker, *chance.sample(others, len(others))]
    ranks = deployed.ranks(run)
    try:
        for lose in order:
            lose()
        deployed.finish(run, ranks)
    except BaseException as error:
        names = ", ".join(lose.__name__ for lose in order)
        error.add_note(f"lost were, in this order: {names}; {SEED}={seed} repeats it")
        raise


def test_a_scheduled_run_keeps_its_commit_and_has_its_model_and_logs_on_s3(
    deployed: Deployed, cluster: TestCluster, server: Server
) -> None:
    values = airflow_chart.celery_values()
    values["logs"]["persistence"]["enabled"] = False
    values["env"] += [*FOLDERS, {"name": "AIRFLOW_CONN_LOGS", "value": connection(server)}]
    bundles = {"dag_bundle_config_list": json.dumps(BUNDLES), "refresh_interval": 5}
    client = server.client()
    for bucket in ("logs", "models"):
        client.mkdir(bucket)
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "storage"}}
    deployed.trainings.create(secret | {"stringData": server.variables})
    deployed.start(values, WORKERS | {"dag_processor": bundles, "logging": ON_S3})
    target = {name: value for name, value in deployed.target.items() if name != "connection"}
    target |= {"launch": "pytorchjob"} | images_with_s3fs(cluster)
    deployed.put("data/words", "many words")
    deployed.shell(f"git init --quiet --initial-branch=main {REPOSITORY}")
    first = commit(deployed, DAG_FILE.format(run=RUN, target=target), PROGRAM)
    deployed.unpause("from_git")
    airflow = deployed.airflow
    (run,) = soon("the scheduled run", lambda: airflow.runs("from_git"))
    ranks = deployed.ranks(run)
    soon("the deferral", lambda: airflow.task(run)["state"] == "deferred")
    soon("the lines of the trigger", lambda: deployed.logged(run, "trigger .* starting", attempt=1))

    other = DAG_FILE.format(run=RUN | {"output": "s3://models/other"}, target=target)
    second = commit(deployed, other, PROGRAM.replace("{words}", "other {words}"))
    soon("the commit", lambda: airflow.api("GET", "dags/from_git")["bundle_version"] == second)
    deployed.finish(run, ranks, read=lambda name: client.cat_file(f"models/one/{name}").decode())
    tasks = airflow.api("GET", f"{run}/taskInstances")["task_instances"]
    assert {task["dag_version"]["bundle_version"] for task in tasks} == {first}
    assert (airflow.runs("from_git"), client.ls("models", detail=False)) == ([run], ["models/one"])

    for pod in deployed.pods("worker") + deployed.pods("triggerer"):
        deployed.kill(pod)
    stored = {path: client.cat_file(path).decode() for path in client.find("logs")}
    for task, ending, line in LOGGED:
        assert len(deployed.logged(run, line, f"training.{task}", attempt=1)) == 1, line
        name = re.compile(rf".*/task_id=training\.{task}/attempt=1\.{ending}")
        (text,) = [text for path, text in stored.items() if name.fullmatch(path)]
        assert re.search(line, text)


def connection(server: Server) -> str:
    """Return Airflow's connection to an S3 server."""
    login = {"login": s3_server.KEY, "password": s3_server.SECRET}
    return json.dumps({"conn_type": "aws", **login, "extra": {"endpoint_url": server.url}})


def commit(deployed: Deployed, dag_file: str, program: str) -> str:
    """Commit a DAG and its program; return the commit."""
    deployed.put("repository/dag.py", dag_file)
    deployed.put("repository/train.py", program)
    git = f"git -C {REPOSITORY} -c user.name=test -c user.email=test@example.com"
    return deployed.shell(f"{git} add . && {git} commit --quiet -m test && {git} rev-parse HEAD").strip()


def _pod_name(hostname: str) -> str:
    return hostname.partition(".")[0]
