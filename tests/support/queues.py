"""A Kueue queue for one test, with its own quota."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

from cluster.space import Space
from kubernetes import client
from kubernetes.client import ApiException
from support.waiting import until

from manycpu.pipeline.spec.kube_object import condition

GROUP, VERSION = "kueue.x-k8s.io", "v1beta2"
QUEUE: Final = "team-a"
HIGH: Final = "urgent"
CLASSES: Final = {HIGH: 1000}


@dataclass(frozen=True)
class Queue:
    """A LocalQueue, and its ClusterQueue, which has the name of the namespace."""

    namespace: Space

    @property
    def _objects(self) -> client.CustomObjectsApi:
        return client.CustomObjectsApi(self.namespace.admin)

    def set_quota(self, cpu: str) -> None:
        """Set how many cores all jobs of the queue may use together."""
        self._objects.patch_cluster_custom_object(
            GROUP, VERSION, "clusterqueues", self.namespace.name, {"spec": _quotas(self.namespace.name, cpu)}
        )

    def workloads(self) -> list[dict[str, Any]]:
        """Return the namespace's workloads."""
        found = self._objects.list_namespaced_custom_object(GROUP, VERSION, self.namespace.name, "workloads")
        return list(found["items"])

    def change_workload(self, spec: dict[str, Any]) -> None:
        """Change the spec of the namespace's only workload."""
        (workload,) = self.workloads()
        self._objects.patch_namespaced_custom_object(
            GROUP, VERSION, self.namespace.name, "workloads", workload["metadata"]["name"], {"spec": spec}
        )


@contextmanager
def queue(namespace: Space, cpu: str) -> Iterator[Queue]:
    """Create a queue with a quota of cores, and the shared priority classes; delete the queue at the end."""
    name, objects = namespace.name, client.CustomObjectsApi(namespace.admin)
    flavor = {"kind": "ResourceFlavor", "metadata": {"name": name}}
    cluster_queue = {
        "kind": "ClusterQueue",
        "metadata": {"name": name},
        "spec": {
            "namespaceSelector": {},
            "preemption": {"withinClusterQueue": "LowerPriority"},
            **_quotas(name, cpu),
        },
    }
    for found, value in CLASSES.items():
        made = {"kind": "WorkloadPriorityClass", "metadata": {"name": found}, "value": value}
        with suppress(ApiException):  # another test may have created the same class
            _create(objects, "workloadpriorityclasses", made)
    _create(objects, "resourceflavors", flavor)
    _create(objects, "clusterqueues", cluster_queue)
    local_queue(namespace, QUEUE, behind=name)
    try:
        yield Queue(namespace)
    finally:
        objects.delete_namespaced_custom_object(GROUP, VERSION, name, "localqueues", QUEUE)
        objects.delete_cluster_custom_object(GROUP, VERSION, "clusterqueues", name)
        objects.delete_cluster_custom_object(GROUP, VERSION, "resourceflavors", name)


def local_queue(namespace: Space, name: str, *, behind: str | None = None) -> None:
    """Create a LocalQueue; wait until it is active. Without a ClusterQueue `behind` it, jobs wait forever."""
    item = {"kind": "LocalQueue", "metadata": {"name": name}, "spec": {"clusterQueue": behind or "nothing"}}
    item["apiVersion"] = f"{GROUP}/{VERSION}"
    objects = client.CustomObjectsApi(namespace.admin)
    objects.create_namespaced_custom_object(GROUP, VERSION, namespace.name, "localqueues", item)

    def is_active() -> bool:
        made: Any = objects.get_namespaced_custom_object(GROUP, VERSION, namespace.name, "localqueues", name)
        return condition(made, "Active") is not None

    if behind:
        until(is_active)


def _create(objects: client.CustomObjectsApi, plural: str, item: dict[str, Any]) -> None:
    item["apiVersion"] = f"{GROUP}/{VERSION}"
    objects.create_cluster_custom_object(GROUP, VERSION, plural, item)


def _quotas(flavor: str, cpu: str) -> dict[str, Any]:
    resources = [{"name": "cpu", "nominalQuota": cpu}, {"name": "memory", "nominalQuota": "100Gi"}]
    flavors = [{"name": flavor, "resources": resources}]
    return {"resourceGroups": [{"coveredResources": ["cpu", "memory"], "flavors": flavors}]}
