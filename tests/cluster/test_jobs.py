"""Work on both nodes: pods that find each other, and a torch all-reduce by a TrainJob.

tests/kubernetes runs the jobs of the other operators.
"""

import time
from typing import Any

import pytest
from cluster import jobs, space
from cluster.fixtures import TestCluster
from cluster.space import Space
from kubernetes.client import ApiException

SUM = 1 + 2
# As many processes as a node has cores, for a minute at most.
COMPUTE = "import os, time\nend = time.time() + 60\nos.fork()\nwhile time.time() < end: pass"


def test_pods_on_both_nodes_find_each_other_by_name(cluster: TestCluster, namespace: Space) -> None:
    image = cluster.image("base")
    serve = "mkdir /www; echo hello >/www/index.html; cd /www; exec python3 -m http.server 8000"
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "server"},
        "spec": {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": 8000}]},
    }
    namespace.by_admin.create(service)
    namespace.create(jobs.pod("server", image, "sh", "-c", serve, node=cluster.nodes[0]))
    fetch = (
        "import time, urllib.request as u\n"
        "for i in range(100):\n"
        "  try: print(u.urlopen('http://server', timeout=2).read().decode()); break\n"
        "  except OSError as e: time.sleep(.2); print(e)"
    )
    namespace.create(jobs.pod("client", image, "python3", "-c", fetch, node=cluster.nodes[1]))
    client = namespace.wait_pod("client", "Succeeded")
    assert namespace.log("client").endswith("hello\n\n")
    assert client.spec.node_name == cluster.nodes[1]
    assert namespace.pod("server").spec.node_name == cluster.nodes[0]
    assert namespace.run("server", "hostname") == "server\n"


def reduced_on_both_nodes(cluster: TestCluster, namespace: Space, selector: str) -> None:
    """Check that the ranks ran on different nodes, and that each has the sum."""
    pods = namespace.pods(selector)
    assert {pod.spec.node_name for pod in pods} == set(cluster.nodes)
    lines = "".join(namespace.log(pod.metadata.name) for pod in pods)
    assert "rank 0 of 2" in lines
    assert "rank 1 of 2" in lines
    assert lines.count(f": {SUM}\n") == 2


def test_trainjob_reduces_across_both_nodes(cluster: TestCluster, namespace: Space) -> None:
    if not space.serves(namespace.admin, "TrainJob"):
        pytest.skip("this cluster has no Kubeflow Trainer")
    namespace.create(jobs.program())
    namespace.by_admin.create(jobs.trainjob("reduce", cluster.image("torch")))
    assert namespace.by_admin.wait_job("TrainJob", "reduce") == "Complete"
    reduced_on_both_nodes(cluster, namespace, "jobset.sigs.k8s.io/jobset-name=reduce")


@pytest.mark.alone
def test_operators_answer_beside_pods_that_compute(cluster: TestCluster, namespace: Space) -> None:
    for node in cluster.nodes:
        pod = jobs.pod(f"computes-{node}", cluster.image("base"), "python3", "-c", COMPUTE, node=node)
        pod["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "1400m"}}
        namespace.create(pod)
    for node in cluster.nodes:
        namespace.wait_pod(f"computes-{node}", "Running")

    def suspended(name: str) -> dict[str, Any]:
        job = jobs.pytorchjob(name, cluster.image("torch"))
        job["spec"]["runPolicy"] = {"suspend": True}
        return job

    end, number = time.monotonic() + 15, 0
    # Webhooks look at each of them. A service whose pod is taken for dead refuses connections.
    while time.monotonic() < end:
        try:
            namespace._create(suspended(f"asked-for-{number}"))  # noqa: SLF001 - at the first try
        except ApiException as error:
            if "deadline exceeded" not in str(error.body):  # slow is a busy machine, and no fault
                raise
        number += 1
    namespace.create(suspended("asked-for-at-last"))  # a slow one answers in the end
