"""The parts that all pods of manycpu share, without API token and privileges; and what a job's ranks need."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from manycpu.pipeline.spec.credentials import HIDDEN, is_secret_variable
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.spec.targets import Kubernetes

UID: Final = 1000
HOME: Final = "/tmp"  # noqa: S108 - inside a pod, with one user
TPU: Final = "google.com/tpu"  # the resource of GKE's nodes with TPUs
TPU_LABELS: Final = {
    "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
    "cloud.google.com/gke-tpu-topology": "2x4",
}
"""Label by which GKE places pods that ask for TPUs -> an example of its value."""
_GRACE_S: Final = 5  # between SIGTERM and SIGKILL; a one-off pod has nothing to finish


def pod_spec(container: KubeObject, volumes: list[KubeObject], **fields: Any) -> KubeObject:
    """Build the spec of a pod of one container, without access to the API server."""
    return {
        "containers": [container],
        "volumes": volumes,
        "automountServiceAccountToken": False,
        # Services of the namespace would add variables, some with names that launchers read.
        "enableServiceLinks": False,
        **fields,
    }


def one_off_pod(metadata: KubeObject, spec: KubeObject, seconds: int) -> KubeObject:
    """Build a pod that runs once, for at most ``seconds`` seconds."""
    end_rules = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": seconds,
        "terminationGracePeriodSeconds": _GRACE_S,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec | end_rules}


def unprivileged() -> KubeObject:
    """Build the securityContext of a container under the Pod Security level ``restricted``."""
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def security_context() -> KubeObject:
    """Build the securityContext of a pod: the user of its processes and volumes."""
    return {
        "runAsNonRoot": True,
        "runAsUser": UID,
        "runAsGroup": UID,
        "fsGroup": UID,
        # Else every start walks through all files of a volume.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def node_selector(target: Kubernetes) -> KubeObject:
    """Return the target's node selector without TPU labels: nodes with TPUs do not admit other pods."""
    return {label: value for label, value in target.node_selector.items() if label not in TPU_LABELS}


def on_nodes(target: Kubernetes, *, ranks: bool = False) -> KubeObject:
    """Build the pod fields that the target sets: nodes, priority, service account, image pull secret.

    ``ranks``: whether this is a pod of ranks. Only such pods may ask for TPUs.
    """
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
    """Build the ``env`` list of a container, with values in which Kubernetes expands nothing.

    Args:
        values: Name -> value.
        secret: Name of the Secret with the secret variables; None: write all values.
        optional: Whether the container may start without a variable that the Secret lacks. This is for a run
            that was opened from its ledger, which has ``HIDDEN`` in place of secrets.
    """
    entries: list[KubeObject] = []
    for name, value in values.items():
        is_secret = is_secret_variable(name, value) or (optional and HIDDEN in value)
        if secret and is_secret:
            reference: KubeObject = {"name": secret, "key": name}
            if optional:
                reference["optional"] = True
            entries.append({"name": name, "valueFrom": {"secretKeyRef": reference}})
        else:
            entries.append({"name": name, "value": literal(value)})
    return entries


def literal(text: str) -> str:
    """Write a text so that Kubernetes expands nothing in it."""
    return text.replace("$", "$$")


class Ranks(NamedTuple):
    """What the ranks of a job need."""

    nodes: int
    """Number of pods that the job needs to begin."""
    pod: KubeObject
    """The spec of each pod."""
