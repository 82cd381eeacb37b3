"""Jobs of many pods, and many jobs, on hollow nodes: a small version of `make scale` without timings."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from airflow.triggers.base import TriggerEvent
from airflow.triggers.shared_stream import SharedStreamManager
from cluster import hollow
from cluster.cluster import Cluster as OwnCluster
from cluster.command import wait_for
from cluster.fixtures import TestCluster
from cluster.hollow import Hollow
from cluster.space import Space
from support.handmade_jobs import Looker, begin, open_namespace
from support.hollow_logs import Ranks, logs

from manycpu.operators import base
from manycpu.operators.job_trigger import JobTrigger
from manycpu.pipeline.adapters.cluster_stream import ClusterStream
from manycpu.pipeline.spec.handle import JobHandle
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.spec.state import RunState, Status
from manycpu.pipeline.targets.kubernetes.context import cluster_of, sharing
from manycpu.pipeline.targets.kubernetes.following.follower import Follower

NODES, WORKERS, JOBS = 60, 56, 40
RESUMED = 10  # this many of the jobs resume; the others are deleted
KINDS = ("pytorchjobs", "pods", "events")
LEDGER = 32_000  # limit of the ledger's size in characters, with this many ranks


@pytest.fixture
def own(cluster: TestCluster) -> OwnCluster:
    """Return the project's own cluster."""
    if cluster.own is None:
        pytest.skip("hollow nodes are processes of the project's own cluster, not of MANYCPU_TEST_KUBECONFIG")
    return cluster.own


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the watches that are started, by the watched resource."""
    begun: Counter[str] = Counter()
    answer = ClusterStream.answer

    def counted(self: ClusterStream, path: str, query: Any, silence: float) -> Any:
        begun[path.rpartition("/")[2]] += "watch" in query
        return answer(self, path, query, silence)

    monkeypatch.setattr(ClusterStream, "answer", counted)
    return begun


@pytest.fixture
def followers(monkeypatch: pytest.MonkeyPatch) -> list[Follower]:
    """Return a list of all followers that are started."""
    running: list[Follower] = []
    run = Follower.run

    async def noted(self: Follower, *given: Any) -> Status:
        running.append(self)
        return await run(self, *given)

    monkeypatch.setattr(Follower, "run", noted)
    return running


def on(nodes: Hollow, **annotations: str) -> Callable[[KubeObject], None]:
    """Return a change that places a job's pods on hollow nodes."""

    def change(job: KubeObject) -> None:
        template = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
        template["spec"] |= nodes.place
        template["metadata"]["annotations"] = annotations

    return change


async def all_of(handles: list[JobHandle], meanwhile: Callable[[], None]) -> list[TriggerEvent]:
    """Follow jobs as one triggerer does; return the event of each job's end."""
    manager = SharedStreamManager()

    async def one(number: int, handle: JobHandle) -> TriggerEvent:
        trigger = JobTrigger(handle=handle.model_dump(mode="json"), cursor=None, by=f"task {number}")
        stream = manager.subscribe(trigger_id=number, trigger=trigger, key=trigger.shared_stream_key())
        async with aclosing(trigger.filter_shared_stream(stream)) as events:  # type: ignore[type-var]
            return await anext(events)

    try:
        ending = asyncio.gather(*(one(number, handle) for number, handle in enumerate(handles)))
        await asyncio.to_thread(meanwhile)
        return await ending
    finally:
        await manager.stop_all()


def test_a_job_of_many_pods_is_met_heard_and_succeeds(
    own: OwnCluster, target: dict[str, Any], cluster: TestCluster, namespace: Space, tmp_path: Path
) -> None:
    waiting = begin(target, cluster.image("base"), tmp_path, nnodes=WORKERS)
    pods = [f"{waiting.ctx.name}-1-worker-{number}" for number in range(WORKERS)]
    with logs(Ranks(WORKERS, rate=2)) as ranks, hollow.nodes(own, NODES, ranks.kubelet) as nodes:
        handle = waiting.create(change=on(nodes))
        looker = Looker(waiting.ctx, handle)
        try:
            looker.until("all ranks to meet", lambda: len(looker.watch.observed.ranks) == WORKERS)
            looker.until(
                "lines of all", lambda: all(looker.said(f"{rank}: line 3") for rank in range(WORKERS))
            )
            ranks.end()
            nodes.end(namespace.name, pods[1:])
            nodes.end(namespace.name, pods[:1])  # the job ends when its first worker ends
            assert looker.to_the_end().state is RunState.SUCCEEDED
        finally:
            looker.close()
        observed = looker.watch.observed
        assert (observed.world_size, len(observed.rounds)) == (WORKERS, 1)
        assert [rank.exit_code for rank in observed.ranks] == [0] * WORKERS
        for rank in range(WORKERS):
            told = [line for line in looker.lines if line.startswith(f"{rank}: line ")]
            assert told == [f"{rank}: line {number}" for number in range(len(told))]
        ledger = cluster_of(waiting.ctx).get("ConfigMap", waiting.ctx.name)
        assert len(json.dumps(ledger)) < LEDGER


def test_many_that_wait_share_one_watch_of_each_kind_and_all_see_their_end(
    own: OwnCluster,
    target: dict[str, Any],
    cluster: TestCluster,
    namespace: Space,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    watches: Counter[str],
    followers: list[Follower],
) -> None:
    # The connection is a path of a kubeconfig, not an Airflow connection.
    monkeypatch.setattr(base, "access_of", lambda _: None)
    with logs(Ranks(1, seconds=0)) as ranks, hollow.nodes(own, NODES, ranks.kubelet) as nodes:
        opened = open_namespace(namespace)
        change = on(nodes, **{hollow.EXIT: "0"})
        handles = [
            begin(target, cluster.image("base"), tmp_path, f"run-{number}", sharing(opened)).create(
                policy={"suspend": True}, change=change
            )
            for number in range(JOBS)
        ]

        def end_once_all_wait() -> None:
            waits = lambda: sum("suspended" in one.status.reason for one in followers) == JOBS  # noqa: E731
            wait_for("all to wait", waits, seconds=60)
            for handle in handles[:RESUMED]:
                opened.patch("PyTorchJob", handle.name, {"spec": {"runPolicy": {"suspend": False}}})
            for handle in handles[RESUMED:]:
                opened.delete("PyTorchJob", handle.name)

        events = asyncio.run(all_of(handles, end_once_all_wait))
    ends = [Status.model_validate(event.payload["status"]) for event in events]
    assert [end for end in ends[:RESUMED] if end.state is not RunState.SUCCEEDED] == []
    assert [end for end in ends[RESUMED:] if "somebody deleted it" not in end.reason] == []
    assert {kind: watches[kind] for kind in KINDS} == dict.fromkeys(KINDS, 1)
