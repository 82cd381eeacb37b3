"""An Airflow in the cluster with CeleryExecutor, as docs/airflow.md deploys it: each part is lost once."""

import os
import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import pytest
from cluster.faults import Faults
from support import airflow_chart
from support.deployed_airflow import Deployed, soon

SEED: Final = "MANYCPU_TEST_SEED"
"""Environment variable: the seed of a failed test, which repeats its order."""
# Airflow's defaults are five minutes, in which the training continues.
CONFIG: Final = {
    "scheduler": {"task_instance_heartbeat_timeout": 30, "orphaned_tasks_check_interval": 15},
    "celery": {"worker_concurrency": 2},
}

pytestmark = [pytest.mark.pod_security("restricted"), pytest.mark.alone]


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
        self.deployed.replaced(self.deployed.place.pod(holder), self.deployed.kill)
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


def test_a_training_outlives_every_part_of_its_airflow(deployed: Deployed, faults: Faults) -> None:
    seed = os.environ.get(SEED) or secrets.token_hex(4)
    chance = random.Random(seed)  # noqa: S311 - to be repeated
    deployed.start(airflow_chart.celery_values(), CONFIG)
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


def _pod_name(hostname: str) -> str:
    return hostname.partition(".")[0]
