"""Every fault has its effect, and is undone.

tests/kubernetes/test_wait.py covers two faults: a killed container and a stopped operator.
"""

import time

import pytest
import urllib3
from cluster import jobs, registry
from cluster.command import wait_for
from cluster.faults import Faults
from cluster.fixtures import TestCluster
from cluster.space import Space, connect
from kubernetes import client
from kubernetes.client import ApiException

FOREVER = ("sleep", "1000")
pytestmark = pytest.mark.alone


def running(
    namespace: Space, cluster: TestCluster, name: str, node: str | None = None, **options: str
) -> None:
    """Create a pod that runs until it is deleted, and wait until it runs."""
    namespace.create(jobs.pod(name, cluster.image("base"), *FOREVER, node=node, **options))
    namespace.wait_pod(name, "Running")


def test_a_stopped_kubelet_makes_its_node_not_ready(
    faults: Faults, cluster: TestCluster, namespace: Space
) -> None:
    running(namespace, cluster, "lives", "node-b")
    with faults.kubelet_stopped("node-b"):
        wait_for("node-b to be lost", lambda: not faults.node_ready("node-b"), seconds=60)
        assert faults.node_ready("node-a")
    assert faults.node_ready("node-b")
    running(namespace, cluster, "after", "node-b")


def test_a_cordoned_node_takes_no_pods(faults: Faults, cluster: TestCluster, namespace: Space) -> None:
    with faults.cordoned("node-b"):
        namespace.create(jobs.pod("waits", cluster.image("base"), *FOREVER, node="node-b"))
        events = namespace.core.list_namespaced_event
        wait_for(
            "the pod to be unschedulable",
            lambda: any("unschedulable" in e.message for e in events(namespace.name).items),
            seconds=20,
        )
        assert namespace.pod("waits").status.phase == "Pending"
    namespace.wait_pod("waits", "Running")


def test_a_drained_node_loses_its_pods(faults: Faults, cluster: TestCluster, namespace: Space) -> None:
    running(namespace, cluster, "stays", "node-a")
    running(namespace, cluster, "leaves", "node-b")
    with faults.drained("node-b", "app=leaves"):
        assert [pod.metadata.name for pod in namespace.pods()] == ["stays"]
    running(namespace, cluster, "after", "node-b")


def test_a_full_volume_takes_nothing_more_and_an_emptied_one_has_nothing(
    faults: Faults, cluster: TestCluster, namespace: Space
) -> None:
    namespace.create(jobs.claim("data", "shared", "ReadWriteMany"))
    running(namespace, cluster, "writer", claim="data")
    write = ("sh", "-c", "head -c 10M /dev/zero >/data/file && echo written")
    with faults.volumes_full():
        assert "No space left on device" in namespace.run("writer", *write)
    assert namespace.run("writer", *write) == "written\n"
    faults.empty_volume(namespace, "data")
    assert namespace.run("writer", "ls", "/data") == ""


def test_without_the_registry_a_new_image_cannot_be_pulled(
    faults: Faults, cluster: TestCluster, namespace: Space
) -> None:
    name, _, tag = cluster.image("base").rpartition("/")[2].partition(":")
    assert registry.digest(name, tag)
    by_digest = f"{cluster.registry}/{name}@{registry.digest(name, tag)}"
    with faults.registry_away():
        waits = jobs.pod("waits", by_digest, *FOREVER)
        # The node may have the image from an earlier session.
        waits["spec"]["containers"][0]["imagePullPolicy"] = "Always"
        namespace.create(waits)
        running(namespace, cluster, "has-its-image")
        events = namespace.core.list_namespaced_event
        wait_for(
            "a failed pull",
            lambda: any("connection refused" in e.message for e in events(namespace.name).items),
            seconds=30,
        )
    namespace.wait_pod("waits", "Running", seconds=90)


def test_a_cut_off_node_has_pods_that_reach_nothing(
    faults: Faults, cluster: TestCluster, namespace: Space
) -> None:
    running(namespace, cluster, "here", "node-a")
    running(namespace, cluster, "there", "node-b")
    address = namespace.pod("here").status.pod_ip
    ask = (
        "import socket\n"
        f"try: socket.create_connection(('{address}', 9), 2)\n"
        "except OSError as error: print(type(error).__name__)"
    )
    reach = ("python3", "-c", ask)
    assert namespace.run("there", *reach) == "ConnectionRefusedError\n"
    with faults.pods_cut_off("node-b"):
        assert namespace.run("there", *reach) == "TimeoutError\n"
        assert faults.node_ready("node-b")
    assert namespace.run("there", *reach) == "ConnectionRefusedError\n"


def test_the_api_server_is_away_and_back(faults: Faults, namespace: Space) -> None:
    with connect(namespace.kubeconfig) as api:
        core = client.CoreV1Api(api)
        with faults.api_away(), pytest.raises(urllib3.exceptions.HTTPError, match="Connection refused"):
            core.list_namespaced_pod(namespace.name)
        assert core.list_namespaced_pod(namespace.name).items == []


def test_a_slow_api_server_answers_late(faults: Faults, namespace: Space) -> None:
    def seconds() -> float:
        started = time.monotonic()
        namespace.pods()
        return time.monotonic() - started

    with faults.api_slow(1.0):
        wait_for("a late answer", lambda: seconds() > 0.5, seconds=20)
    wait_for("a quick answer", lambda: seconds() < 0.5, seconds=20)


def test_an_expired_token_is_refused(faults: Faults, namespace: Space) -> None:
    kubeconfig, expire = faults.dying_token(namespace)
    with connect(kubeconfig) as api:
        core = client.CoreV1Api(api)
        assert core.list_namespaced_pod(namespace.name).items == []
        expire()
        with pytest.raises(ApiException, match="Unauthorized"):
            wait_for(
                "the token to be refused",
                lambda: core.list_namespaced_pod(namespace.name) and False,
                seconds=30,
            )
