"""Jobs created by hand that tests wait for: each rank is a few lines of Python in the base image."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.command import wait_for
from cluster.space import Space

from manycpu.pipeline.adapters.cluster import Cluster, connect
from manycpu.pipeline.spec.handle import JobHandle
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.spec.naming import labels
from manycpu.pipeline.spec.state import RunState, Status
from manycpu.pipeline.targets import Watch
from manycpu.pipeline.targets.context import Access
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, cluster_of, is_on_kubernetes
from manycpu.pipeline.targets.kubernetes.launch import _make_handle
from manycpu.pipeline.targets.open_run import open_context
from manycpu.pipeline.targets.outcome import outcome
from manycpu.pipeline.verbs.wait import watch

# A rank that sends the same events as manycpu's program of ranks. `script` is what it does after the proof.
RANK = """
import json, os, socket, sys, time
rank = int(os.environ["RANK_HERE"])
world, host = {world}, os.environ["NODE"]
def say(text): print(f"[rank {{rank}} {{host}}] {{text}}", flush=True)
def tell(event, **more):
    say("::manycpu:: " + json.dumps({{"event": event, "rank": rank, "host": host, **more}}))
tell("proof", world_size=world, cpus=1.0, round=0, backend="gloo", threads=1, hostname=socket.gethostname())
tell("backend", asked="gloo", observed="gloo")
{script}
tell("exit", code=0)
"""


@dataclass(frozen=True)
class Waiting:
    """A run whose job the test creates by hand."""

    ctx: ClusterContext
    image: str
    nodes: int

    def create(
        self,
        script: str = "",
        *,
        attempt: int = 1,
        change: Callable[[KubeObject], object] | None = None,
        **spec: Any,
    ) -> JobHandle:
        """Create a PyTorchJob with one worker for each node, and record it as an attempt; return its handle.

        ``change`` may edit the manifest first. ``spec`` is as in :meth:`pytorchjob`.
        """
        manifest = self.pytorchjob(script, attempt, **spec)
        if change is not None:
            change(manifest)
        return self.attempt(cluster_of(self.ctx).create(manifest), attempt)

    def attempt(self, job: KubeObject, number: int = 1) -> JobHandle:
        """Record an existing job as an attempt of the run; return its handle."""
        handle = _make_handle(self.ctx, job, number)
        with self.ctx.ledger.update() as entry:
            entry.attempt, entry.handle = number, handle
        return handle

    def pytorchjob(self, script: str, attempt: int = 1, **spec: Any) -> KubeObject:
        """Return the manifest of the PyTorchJob; its pods request almost no CPU and memory.

        ``spec`` has fields of the job; ``pods`` and ``policy`` in it are those of pods and of the run policy.
        """
        known = labels(self.ctx.name, attempt=str(attempt))
        container = {
            "name": "pytorch",
            "image": self.image,
            "command": ["python3", "-u", "-c", RANK.format(world=self.nodes, script=script)],
            "resources": {"requests": {"cpu": "10m", "memory": "20Mi"}},
            "env": [
                {
                    "name": "RANK_HERE",
                    "valueFrom": _field("metadata.labels['training.kubeflow.org/replica-index']"),
                },
                {"name": "NODE", "valueFrom": _field("spec.nodeName")},
            ],
        }
        pods = {"terminationGracePeriodSeconds": 0, "containers": [container], **spec.pop("pods", {})}
        worker = {
            "replicas": self.nodes,
            "restartPolicy": spec.pop("restart", "Never"),
            "template": {"metadata": {"labels": known | {"manycpu/role": "rank"}}, "spec": pods},
        }
        return {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": {
                "name": f"{self.ctx.name}-{attempt}",
                "labels": known,
                "ownerReferences": self.ctx.ledger.owner(),
            },
            "spec": {
                "runPolicy": {"cleanPodPolicy": "None", **spec.pop("policy", {})},
                "pytorchReplicaSpecs": {"Worker": worker},
                **spec,
            },
        }

    def pod_of(self, handle: JobHandle, number: int = 0) -> str:
        return f"{handle.name}-worker-{number}"


def begin(
    target: dict[str, Any],
    image: str,
    folder: Path,
    name: str = "wait",
    access: Access | None = None,
    **run: Any,
) -> Waiting:
    """Open a run and its ledger, without a job; ``run`` has fields of the run."""
    fields = {"program": "question_answering", "output": str(folder / "out"), **run}
    ctx = open_context(fields, target, name, str(folder), base=folder, access=access)
    assert is_on_kubernetes(ctx)
    ctx.ledger.open(ctx.new_entry(time.time()))
    return Waiting(ctx, image, ctx.run.nodes[1])


class Looker:
    """Follows a job until a condition is true, and keeps its lines and status."""

    def __init__(self, ctx: ClusterContext, handle: JobHandle, cursor: Any = None) -> None:
        self.ctx, self.handle = ctx, handle
        self.watch: Watch = watch(ctx, handle, cursor)
        self.lines: list[str] = []
        self.seen = Status(state=RunState.PENDING)

    def __str__(self) -> str:
        """Return the status and all lines, as the message of an assertion."""
        return "\n  ".join([f"{self.handle.name}: {self.seen.state} {self.seen.reason}", *self.lines])

    def look(self) -> Status:
        lines, self.seen = self.watch.look()
        self.lines += [line.text if line.rank is None else f"{line.rank}: {line.text}" for line in lines]
        return self.seen

    def until(self, what: str, there: Callable[[], object], seconds: float = 90) -> None:
        wait_for(what, lambda: (self.look(), there())[1], seconds=seconds, every=0.1)

    def to_the_end(self, seconds: float = 120) -> Status:
        self.until("the end", lambda: self.seen.state.terminal, seconds)
        return outcome(self.ctx, self.seen, self.watch.observed)

    def said(self, text: str) -> list[str]:
        return [line for line in self.lines if text in line]

    def close(self) -> None:
        self.watch.close()
        self.look()


def open_namespace(where: Space) -> Cluster:
    return Cluster(lambda: connect(str(where.kubeconfig)), where.name)


def _field(path: str) -> KubeObject:
    return {"fieldRef": {"fieldPath": path}}
