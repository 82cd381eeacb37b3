"""The volumes of storage class `node-local`: a few on each node, reused once their claim is deleted."""

import json
from collections.abc import Callable
from typing import Any

from cluster.namespace import Namespace
from cluster.settings import NODES, VOLUMES, Node

CLASSES = {"shared": "ReadWriteMany, the default", "node-local": "ReadWriteOnce, bound to a node"}
VOLUMES_PER_NODE = 4
Kubectl = Callable[..., str]


def create(namespace: Namespace, kubectl: Kubectl) -> None:
    """Create the folders of all node-local volumes, and a PersistentVolume for each."""
    volumes = [_volume(node, number) for node in NODES for number in range(VOLUMES_PER_NODE)]
    for volume in volumes:
        _make_empty(namespace, volume["spec"]["local"]["path"])
    kubectl(
        "create", "--filename", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": volumes})
    )


def _make_empty(namespace: Namespace, path: str) -> None:
    namespace.run("sh", "-c", 'rm -rf "$0" && mkdir -m 777 "$0"', path)


def _volume(node: Node, number: int) -> dict[str, Any]:
    name = f"{node.name}-{number}"
    on_node = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node.name]}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "storageClassName": "node-local",
            "accessModes": ["ReadWriteOnce"],
            "capacity": {"storage": "2Gi"},
            "persistentVolumeReclaimPolicy": "Retain",
            "local": {"path": str(VOLUMES / name)},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [on_node]}]}},
        },
    }


def recycle(namespace: Namespace, kubectl: Kubectl) -> None:
    """Empty the node-local volumes whose claim was deleted, and make them available again."""
    volumes = json.loads(kubectl("get", "persistentvolumes", "--output", "json"))["items"]
    for volume in volumes:
        if volume["spec"]["storageClassName"] == "node-local" and volume["status"]["phase"] == "Released":
            _make_empty(namespace, volume["spec"]["local"]["path"])
            kubectl(
                "patch",
                "persistentvolume",
                volume["metadata"]["name"],
                "--patch",
                '{"spec":{"claimRef":null}}',
            )
