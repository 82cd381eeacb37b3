"""What all pods of ours share, such as no API token and no privileges; and what a job's ranks need."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from manycpu.pipeline.spec.credentials import is_secret
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.spec.targets import Kubernetes

__all__ = [
    "HOME",
    "TPU",
    "TPU_LABELS",
    "UID",
    "Ranks",
    "env_list",
    "find_rank_template",
    "literal",
    "node_selector",
    "on_nodes",
    "one_off_pod",
    "pod_spec",
    "security_context",
    "unprivileged",
]

UID: Final = 1000
HOME: Final = "/tmp"  # noqa: S108 - inside a pod, where nobody else is
TPU: Final = "google.com/tpu"  # the resource of GKE's nodes with TPUs
TPU_LABELS: Final = {
    "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
    "cloud.google.com/gke-tpu-topology": "2x4",
}
"""Label by which GKE places pods that ask for TPUs -> an example of its value."""
_GRACE_S: Final = 5  # seconds: such a pod has nothing to finish


def pod_spec(container: KubeObject, volumes: list[KubeObject], **fields: Any) -> KubeObject:
    """Build the spec of a pod of one container, which can ask the cluster for nothing."""
    return {
        "containers": [container],
        "volumes": volumes,
        "automountServiceAccountToken": False,
        # Services of the namespace would fill the environment, some in the names that launchers read.
        "enableServiceLinks": False,
        **fields,
    }


def one_off_pod(metadata: KubeObject, spec: KubeObject, seconds: int) -> KubeObject:
    """Build a pod that runs once, and is ended after so many seconds at the latest."""
    ends = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": seconds,
        "terminationGracePeriodSeconds": _GRACE_S,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec | ends}


def unprivileged() -> KubeObject:
    """Build the securityContext of a container under the Pod Security level ``restricted``."""
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def security_context() -> KubeObject:
    """Whom a pod's processes and its volumes belong to."""
    return {
        "runAsNonRoot": True,
        "runAsUser": UID,
        "runAsGroup": UID,
        "fsGroup": UID,
        # A volume of many files is not walked through at every start.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def node_selector(target: Kubernetes) -> KubeObject:
    """Choose the nodes of a pod that asks for no TPU: those with TPUs let no such pod in."""
    return {label: value for label, value in target.node_selector.items() if label not in TPU_LABELS}


def on_nodes(target: Kubernetes, *, ranks: bool = False) -> KubeObject:
    """Say which nodes a pod may run on, as whom, and from where its image comes."""
    fields = {
        "nodeSelector": target.node_selector if ranks else node_selector(target),
        "tolerations": list(target.tolerations),
        "priorityClassName": target.priority_class,
        "serviceAccountName": target.service_account,
        "imagePullSecrets": [{"name": target.pull_secret}] if target.pull_secret else None,
    }
    return {name: value for name, value in fields.items() if value}


def env_list(
    values: Mapping[str, str], secret: str | None = None, *, optional: bool = False
) -> list[KubeObject]:
    """Write the environment of a container, in which Kubernetes expands nothing.

    Args:
        values: Name -> value.
        secret: Name of the Secret with the variables that are called like one; None: all are written out.
        optional: Whether the container starts without one that is not in the Secret.
    """
    listed: list[KubeObject] = []
    for name, value in values.items():
        if secret and is_secret(name):
            key = {"name": secret, "key": name} | ({"optional": True} if optional else {})
            listed.append({"name": name, "valueFrom": {"secretKeyRef": key}})
        else:
            listed.append({"name": name, "value": literal(value)})
    return listed


def literal(text: str) -> str:
    """Write a text so that Kubernetes expands nothing in it."""
    return text.replace("$", "$$")


class Ranks(NamedTuple):
    """What the ranks of a job need."""

    nodes: int
    """Pods without which it cannot begin."""
    pod: KubeObject
    """The spec of each."""


def find_rank_template(objects: Iterable[KubeObject]) -> KubeObject:
    """Find the template of a rank's pod among what a launcher describes, by its label."""
    return next(template for template in _inside(objects) if _is_rank(template))


def _inside(node: Any) -> Iterator[Any]:
    yield node
    inner = node.values() if isinstance(node, Mapping) else node if isinstance(node, (list, tuple)) else ()
    for part in inner:
        yield from _inside(part)


def _is_rank(node: Any) -> bool:
    match node:
        case {"metadata": {"labels": {"manycpu/role": "rank"}}, "spec": _}:
            return True
    return False
