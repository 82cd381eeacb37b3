"""Jobs of many pods, and many jobs, on hollow nodes: what `make scale` measures, smaller, and without times."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator
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
from support.handmade_jobs import Looker, Waiting, begin, cluster_of
from support.hollow_logs import Ranks, logs

from manycpu.operators import access
from manycpu.operators.job_trigger import JobTrigger
from manycpu.pipeline.adapters.cluster_stream import ClusterStream
from manycpu.pipeline.spec.handle import JobHandle
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.spec.state import RunState, Status
from manycpu.pipeline.targets.context import Access
from manycpu.pipeline.targets.kubernetes.following.follower import Follower

NODES, WORKERS, JOBS = 60, 56, 100
LEDGER = 32_000  # characters of what the ledger keeps of so many ranks


@pytest.fixture
def own(cluster: TestCluster) -> OwnCluster:
    """Give the project's own cluster."""
    if cluster.own is None:
        pytest.skip("hollow nodes are processes of the project's own cluster, not of MANYCPU_TEST_KUBECONFIG")
    return cluster.own


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the watches that are begun, by what is watched."""
    begun: Counter[str] = Counter()
    answer = ClusterStream.answer

    def counted(self: ClusterStream, path: str, query: Any, silence: float) -> Any:
        begun[path.rpartition("/")[2]] += "watch" in query
        return answer(self, path, query, silence)

    monkeypatch.setattr(ClusterStream, "answer", counted)
    return +begun if False else begun


def on(nodes: Hollow, **annotations: str) -> Callable[[KubeObject], None]:
    """Have a job's pods on hollow nodes."""

    def change(job: KubeObject) -> None:
        template = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
        template["spec"] |= nodes.place
        template["metadata"]["annotations"] = annotations

    return change
