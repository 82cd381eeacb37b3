"""Volumes: shared by both nodes, or bound to one."""

import pytest
from cluster import jobs
from cluster.command import wait_for
from cluster.fixtures import TestCluster
from cluster.space import Space
from kubernetes import client


def test_a_shared_volume_is_written_and_read_on_different_nodes(
    cluster: TestCluster, namespace: Space
) -> None:
    image = cluster.image("base")
    namespace.create(jobs.claim("data", "shared", "ReadWriteMany"))
    namespace.create(
        jobs.pod("writer", image, "sh", "-c", "echo kept >/data/file", node=cluster.nodes[0], claim="data")
    )
    namespace.wait_pod("writer", "Succeeded")
    namespace.create(jobs.pod("reader", image, "cat", "/data/file", node=cluster.nodes[1], claim="data"))
    namespace.wait_pod("reader", "Succeeded")
    assert namespace.log("reader") == "kept\n"


def test_a_local_volume_binds_its_pods_to_a_node_and_is_used_again(
    cluster: TestCluster, namespace: Space
) -> None:
    if cluster.own is None:
        pytest.skip("storage class node-local is of the project's own cluster")
    image = cluster.image("base")
    namespace.create(jobs.claim("data", "node-local", "ReadWriteOnce"))
    namespace.create(jobs.pod("first", image, "touch", "/data/file", node=cluster.nodes[1], claim="data"))
    namespace.wait_pod("first", "Succeeded")
    namespace.create(jobs.pod("second", image, "ls", "/data", claim="data"))
    assert namespace.wait_pod("second", "Succeeded").spec.node_name == cluster.nodes[1]
    assert namespace.log("second") == "file\n"
    volume = namespace.core.read_namespaced_persistent_volume_claim("data", namespace.name).spec.volume_name
    assert volume.startswith(cluster.nodes[1])


def test_volumes_are_removed_with_their_claims(namespace: Space) -> None:
    core = client.CoreV1Api(namespace.admin)
    namespace.create(jobs.claim("data", "shared", "ReadWriteMany"))

    def volume() -> str:
        return str(
            core.read_namespaced_persistent_volume_claim("data", namespace.name).spec.volume_name or ""
        )

    name = wait_for("the claim to be bound", volume, seconds=20)
    core.delete_namespaced_persistent_volume_claim("data", namespace.name)

    def removed() -> bool:
        return name not in [volume.metadata.name for volume in core.list_persistent_volume().items]

    wait_for("the volume to be removed", removed, seconds=30)
