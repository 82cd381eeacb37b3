"""Where the API serves each kind of object that a run may have in its namespace."""

from typing import Final

from manycpu.pipeline.spec.job_kinds import ApiResource, resources
from manycpu.pipeline.spec.kueue import LOCAL_QUEUE, VISIBILITY, WORKLOAD

__all__ = ["CORE", "resource_of"]

CORE: Final = {
    "ConfigMap": "configmaps",
    "Event": "events",
    "LimitRange": "limitranges",
    "PersistentVolumeClaim": "persistentvolumeclaims",
    "Pod": "pods",
    "ResourceQuota": "resourcequotas",
    "Secret": "secrets",
    "Service": "services",
    "ServiceAccount": "serviceaccounts",
}
"""What a run may have in its namespace besides jobs and their companions: kind -> plural."""
_JOB: Final = ApiResource("Job", "batch", "v1", "jobs")
_OTHERS: Final = {resource.kind: resource for resource in (_JOB, LOCAL_QUEUE, VISIBILITY, WORKLOAD)}


def resource_of(kind: str) -> ApiResource:
    """Look up where the API serves a kind of object that a run may have in its namespace.

    >>> resource_of("Pod").path, resource_of("MPIJob").path
    ('/api/v1', '/apis/kubeflow.org/v2beta1')
    """
    return ApiResource(kind, "", "v1", CORE[kind]) if kind in CORE else {**resources(), **_OTHERS}[kind]
