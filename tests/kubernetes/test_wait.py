"""Waiting for jobs on the cluster: status messages, how jobs end, and that no log line is lost."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cluster.command import wait_for
from cluster.faults import Faults
from cluster.fixtures import TestCluster
from cluster.space import Space
from kubernetes import client
from support.handmade_jobs import Looker, Waiting, begin

from manycpu.pipeline.spec.naming import labels
from manycpu.pipeline.spec.state import RunState
from manycpu.pipeline.targets.kubernetes.context import cluster_of
from manycpu.pipeline.targets.outcome import outcome
from manycpu.pipeline.verbs.cancel import cancel

Begin = Callable[..., Waiting]
COUNT = "for n in range({n}): say(f'line {{n}}'); time.sleep({pause})"


@pytest.fixture
def a_job(target: dict[str, Any], cluster: TestCluster, tmp_path: Path) -> Begin:
    """Return a function that opens a run; the test creates its job by hand."""
    return lambda **run: begin(target, cluster.image("base"), tmp_path, **run)


@pytest.fixture
def look() -> Iterator[Callable[..., Looker]]:
    """Return a function that follows a job; closes all followers at the end."""
    lookers: list[Looker] = []

    def make(waiting: Waiting, handle: Any, cursor: Any = None) -> Looker:
        lookers.append(Looker(waiting.ctx, handle, cursor))
        return lookers[-1]

    yield make
    for looker in lookers:
        looker.watch.close()


def test_every_line_of_every_rank_is_told_once_and_in_order(
    a_job: Begin, look: Callable[..., Looker]
) -> None:
    waiting = a_job(nnodes=2)
    handle = waiting.create(COUNT.format(n=200, pause=0.002))
    looker = look(waiting, handle)
    seen = looker.to_the_end()
    assert seen.state is RunState.SUCCEEDED
    for rank in (0, 1):
        assert looker.said(f"{rank}: line ") == [f"{rank}: line {n}" for n in range(200)]
    assert looker.said("nothing is known of") == []  # the account may watch everything that is watched
    observed = waiting.ctx.driver.observed_of(waiting.ctx, handle)
    assert (observed.world_size, len(observed.ranks), observed.backend) == (2, 2, "gloo")


def test_another_watch_goes_on_where_one_came_to(a_job: Begin, look: Callable[..., Looker]) -> None:
    waiting = a_job(nnodes=2)
    handle = waiting.create(COUNT.format(n=100, pause=0.05))
    first = look(waiting, handle)
    first.until("some lines", lambda: first.said("line 20"))
    first.close()
    second = look(waiting, handle, first.watch.cursor)
    assert second.to_the_end().state is RunState.SUCCEEDED
    for rank in (0, 1):
        told = first.said(f"{rank}: line ") + second.said(f"{rank}: line ")
        assert told == [f"{rank}: line {n}" for n in range(100)]
    assert len(waiting.ctx.driver.observed_of(waiting.ctx, handle).rounds) == 1


@pytest.mark.alone
def test_lines_come_once_and_all_through_an_api_server_that_goes_away(
    a_job: Begin, look: Callable[..., Looker], faults: Faults
) -> None:
    waiting = a_job(nnodes=2)
    handle = waiting.create(COUNT.format(n=400, pause=0.05))
    looker = look(waiting, handle)
    looker.until("some lines", lambda: looker.said("line 20"))
    with faults.api_away():
        looker.look()
    assert looker.to_the_end().state is RunState.SUCCEEDED
    for rank in (0, 1):
        assert looker.said(f"{rank}: line ") == [f"{rank}: line {n}" for n in range(400)]


def test_an_expired_token_is_renewed(
    a_job: Begin, look: Callable[..., Looker], faults: Faults, namespace: Space, target: dict[str, Any]
) -> None:
    dying, expire = faults.dying_token(namespace)
    target["connection"] = str(dying)
    waiting = a_job()
    handle = waiting.create(COUNT.format(n=200, pause=0.05))
    looker = look(waiting, handle)
    looker.until("some lines", lambda: looker.said("line 5"))
    expire()
    dying.write_text(namespace.kubeconfig.read_text())
    assert looker.to_the_end().state is RunState.SUCCEEDED
    assert looker.said("0: line ") == [f"0: line {n}" for n in range(200)]


class Stuck(NamedTuple):
    """A job that never runs: fields of the run and of the job, the exceeded budget, and the reason."""

    run: dict[str, Any]
    job: dict[str, Any]
    budget: str
    reason: str


def _stuck(registry: str) -> dict[str, Stuck]:
    lacking = f"{registry}/no-such-image:1"
    keys = {"volumes": [{"name": "keys", "secret": {"secretName": "no-such-secret"}}]}
    mounted = {"volumeMounts": [{"name": "keys", "mountPath": "/keys"}]}
    data = {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "no-such-claim"}}]}
    broken = ["python3", "-u", "-c", "print('broken'); raise SystemExit(3)"]
    queued, starting = "run.queue_timeout", "run.start_timeout"
    return {
        "node": Stuck(
            {"nnodes": 2, "queue_timeout": 8},
            {"pods": {"nodeSelector": {"disk": "punched-cards"}}},
            queued,
            r"no node.*0/2 nodes are available",  # also if it yields to the other jobs here
        ),
        "claim": Stuck(
            {"queue_timeout": 8}, {"pods": data}, queued, 'persistentvolumeclaim "no-such-claim" not found'
        ),
        "image": Stuck(
            {"start_timeout": 15},
            {"change": lambda job: of_rank(job).update(image=lacking)},
            starting,
            f"image {lacking} of container pytorch cannot be pulled.*not found",
        ),
        "volume": Stuck(
            {"start_timeout": 15},
            {"pods": keys, "change": lambda job: of_rank(job).update(mounted)},
            starting,
            'volume: MountVolume.SetUp failed for volume "keys"',
        ),
        "crashes": Stuck(
            {"start_timeout": 45, "max_restarts": 9},
            {"restart": "OnFailure", "change": lambda job: of_rank(job).update(command=broken)},
            starting,
            r"started [3-9] .*ended with exit code 3",
        ),
    }


def test_what_keeps_a_job_from_running_is_named(
    a_job: Begin, look: Callable[..., Looker], cluster: TestCluster
) -> None:
    jobs = _stuck(cluster.registry)
    waiting = {name: a_job(name=name, **job.run) for name, job in jobs.items()}
    lookers = {name: look(begun, begun.create(**jobs[name].job)) for name, begun in waiting.items()}
    wait_for("all to end", lambda: {ended(looker) for looker in lookers.values()} == {True}, seconds=120)
    for name, (_, _, budget, reason) in jobs.items():
        seen = outcome(waiting[name].ctx, lookers[name].seen, lookers[name].watch.observed)
        assert (name, seen.state, seen.budget) == (name, RunState.FAILED, budget)
        assert re.search(reason, seen.reason, re.DOTALL), (name, seen.reason)
    assert lookers["image"].said("cannot be pulled")  # also while it was pending
    starts = int(lookers["crashes"].seen.reason.split("started ")[1].split()[0])
    assert len(lookers["crashes"].said("/pytorch] broken")) == starts >= 3
    for begun in waiting.values():
        is_gone(begun)


def ended(looker: Looker) -> bool:
    return looker.seen.state.terminal or looker.look().state.terminal


def test_a_quota_that_refuses_the_pods(a_job: Begin, look: Callable[..., Looker], namespace: Space) -> None:
    quota = {"metadata": {"name": "tight"}, "spec": {"hard": {"pods": "0"}}}
    client.CoreV1Api(namespace.admin).create_namespaced_resource_quota(namespace.name, quota)
    waiting = a_job(queue_timeout=8)
    seen = look(waiting, waiting.create()).to_the_end()
    assert seen.budget == "run.queue_timeout"
    assert "pods are refused" in seen.reason
    assert "exceeded quota: tight" in seen.reason


@pytest.mark.alone
def test_without_an_operator_nobody_waits_for_ever(
    a_job: Begin, look: Callable[..., Looker], faults: Faults
) -> None:
    # Stops mpi-operator: training-operator has a webhook, without which no PyTorchJob can be created.
    waiting = a_job(acknowledge_timeout=5, nnodes=1)
    waiting.ctx.__dict__["target"] = waiting.ctx.target.model_copy(update={"launch": "mpijob"})
    with faults.operator_stopped("mpi-operator"):
        handle = waiting.create(change=as_mpijob)
        seen = look(waiting, handle).to_the_end()
        assert seen.budget == "run.acknowledge_timeout"
        assert "is the mpi-operator running" in seen.reason
        is_gone(waiting)


def as_mpijob(job: Any) -> None:
    worker = job["spec"].pop("pytorchReplicaSpecs")["Worker"]
    job["apiVersion"], job["kind"] = "kubeflow.org/v2beta1", "MPIJob"
    job["spec"]["mpiReplicaSpecs"] = {"Launcher": worker, "Worker": worker}


def test_an_mpijob_that_its_operator_refuses(a_job: Begin, look: Callable[..., Looker]) -> None:
    waiting = a_job(nnodes=1)
    waiting.ctx.__dict__["target"] = waiting.ctx.target.model_copy(update={"launch": "mpijob"})

    def without_launcher(job: Any) -> None:
        as_mpijob(job)
        del job["spec"]["mpiReplicaSpecs"]["Launcher"]

    seen = look(waiting, waiting.create(change=without_launcher)).to_the_end()
    assert seen.state is RunState.FAILED
    assert "the operator refuses the job" in seen.reason
    is_gone(waiting)


def test_a_rank_that_is_killed_is_named_with_its_last_lines(
    a_job: Begin, look: Callable[..., Looker], faults: Faults, namespace: Space
) -> None:
    waiting = a_job(nnodes=2)
    handle = waiting.create("say('so far so good'); time.sleep(600)")
    looker = look(waiting, handle)
    looker.until("both to speak", lambda: len(looker.said("so far so good")) == 2)
    faults.kill_container(namespace, waiting.pod_of(handle, 1))
    seen = looker.to_the_end()
    assert seen.state is RunState.FAILED
    assert seen.failure is not None
    assert (seen.failure.rank, seen.failure.exit_code) == (1, -9)
    assert "so far so good" in str(seen.failure)
    is_gone(waiting)  # the other rank would have continued without use


def test_an_evicted_pod_is_said_to_be(a_job: Begin, look: Callable[..., Looker], namespace: Space) -> None:
    waiting = a_job(nnodes=2)
    handle = waiting.create("say('here'); time.sleep(600)")
    looker = look(waiting, handle)
    looker.until("both to speak", lambda: len(looker.said(": here")) == 2)
    name = waiting.pod_of(handle, 1)
    eviction = {"metadata": {"name": name}}
    client.CoreV1Api(namespace.admin).create_namespaced_pod_eviction(name, namespace.name, eviction)
    looker.until("a word on it", lambda: f"pod {name} was evicted" in looker.seen.reason)


def test_a_cancelled_run_says_by_whom(a_job: Begin, look: Callable[..., Looker]) -> None:
    waiting = a_job()
    handle = waiting.create("say('here'); time.sleep(600)")
    looker = look(waiting, handle)
    looker.until("it to speak", lambda: looker.said(": here"))
    assert cancel(waiting.ctx, by="somebody in a hurry")
    seen = looker.to_the_end()
    assert (seen.state, seen.reason) == (RunState.CANCELLED, "ended by somebody in a hurry")


def test_a_job_that_was_deleted_is_no_success(a_job: Begin, look: Callable[..., Looker]) -> None:
    waiting = a_job()
    handle = waiting.create("say('here'); time.sleep(600)")
    looker = look(waiting, handle)
    looker.until("it to speak", lambda: looker.said(": here"))
    cluster_of(waiting.ctx).delete("PyTorchJob", handle.name, grace=0)
    seen = looker.to_the_end()
    assert seen.state is RunState.FAILED
    assert "somebody deleted it" in seen.reason


@pytest.mark.parametrize(
    ("nodes", "command", "told"),
    [(2, ["true"], "no rank ever introduced itself"), (1, None, "2 ranks were asked for, 1 met")],
)
def test_a_job_that_succeeds_without_its_proof_is_a_failure(
    nodes: int, command: list[str] | None, told: str, a_job: Begin, look: Callable[..., Looker]
) -> None:
    waiting = replace(a_job(nnodes=2), nodes=nodes)
    handle = waiting.create(change=lambda job: command and of_rank(job).update(command=command))
    seen = look(waiting, handle).to_the_end()
    assert (seen.state, told in seen.reason) == (RunState.FAILED, True), seen


def of_rank(job: Any) -> Any:
    return job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]


def is_gone(waiting: Waiting) -> None:
    """Check that the job and its pods are deleted."""
    known = labels(waiting.ctx.name)

    def nothing() -> bool:
        return not any(cluster_of(waiting.ctx).list(kind, known) for kind in ("PyTorchJob", "MPIJob", "Pod"))

    wait_for("the job to be gone", nothing, seconds=60)
