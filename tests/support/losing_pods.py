"""A listener that ends a pod of a training, for tests of what the training does then."""

from cluster.space import Space
from kubernetes import client

from manycpu.pipeline.listeners import Silent
from manycpu.pipeline.spec.events import RankLine


class LosesAtStep5(Silent):
    """Listener that deletes or evicts the last worker's pod when all ranks have reached step 5."""

    def __init__(self, namespace: Space, ranks: int, *, by_eviction: bool = False) -> None:
        self.namespace, self.ranks, self.by_eviction, self.there = namespace, ranks, by_eviction, 0

    def line(self, line: RankLine) -> None:
        self.there += line.text == "reached step 5"
        if self.there == self.ranks:
            self.there += 1
            pods = [pod.metadata.name for pod in self.namespace.pods("manycpu/role=rank")]
            victim = next(name for name in pods if name.endswith(f"-worker-{self.ranks - 1}"))
            if self.by_eviction:
                core, body = client.CoreV1Api(self.namespace.admin), {"metadata": {"name": victim}}
                core.create_namespaced_pod_eviction(victim, self.namespace.name, body)
            else:
                self.namespace.core.delete_namespaced_pod(victim, self.namespace.name, grace_period_seconds=0)
