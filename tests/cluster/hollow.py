"""Hollow nodes: Node objects that KWOK keeps alive; it simulates the status of their pods, which never run.

The API server, the scheduler and the operators are real, so one machine can have a job of hundreds of pods. A
pod is scheduled to a hollow node only if it asks for that with `Hollow.place`. Other pods are not affected.
"""

import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

import psutil
from cluster import space
from cluster.cluster import Cluster
from cluster.command import wait_for
from cluster.settings import INNER, kubeconfig, run_folder
from kubernetes import client
from kubernetes.client import ApiException

LABEL = "manycpu.test/hollow"
"""Label of each hollow node; its value starts with the process id of the test, so that orphans are found."""
EXIT = "manycpu.test/exit"
"""Pod annotation: the exit code that the pod ends with."""
ENDS = "manycpu.test/ends"
"""Pod annotation: when a pod with an exit code ends, as a time, or seconds after its start such as ``2s``."""
# KWOK renews leases after a quarter of this. The control plane presumes a node lost after 16 s.
LEASE_SECONDS = 40
READY_SECONDS = 120
AT_ONCE = 8  # parallel calls to the API server
# Less than a real node can allocate, so that preflight never finds a hollow node as the largest node.
CAPACITY = {"cpu": "1", "memory": "1Gi", "pods": "4"}

# Without validation: a busy API server takes longer than kubectl waits for the schemas of all kinds.
_CREATE = ("create", "--validate=false", "--filename", "-")
_STAGES = """
apiVersion: kwok.x-k8s.io/v1alpha1
kind: Stage
metadata: {name: node-ready}
spec:
  resourceRef: {apiGroup: v1, kind: Node}
  selector:
    matchExpressions:
    - {key: '.status.conditions.[] | select( .type == "Ready" ) | .status', operator: NotIn, values: ["True"]}
  next:
    statusTemplate: |
      {{ $now := Now }}
      conditions:
      {{ range NodeConditions }}
      - lastHeartbeatTime: {{ $now | Quote }}
        lastTransitionTime: {{ $now | Quote }}
        message: {{ .message | Quote }}
        reason: {{ .reason | Quote }}
        status: {{ .status | Quote }}
        type: {{ .type | Quote }}
      {{ end }}
      phase: Running
---
apiVersion: kwok.x-k8s.io/v1alpha1
kind: Stage
metadata: {name: pod-running}
spec:
  resourceRef: {apiGroup: v1, kind: Pod}
  selector:
    matchExpressions:
    - {key: .metadata.deletionTimestamp, operator: DoesNotExist}
    - {key: .status.phase, operator: In, values: [Pending]}
  next:
    statusTemplate: |
      {{ $now := Now }}
      conditions:
      {{ range $type := list "Initialized" "Ready" "ContainersReady" }}
      - {lastTransitionTime: {{ $now | Quote }}, status: "True", type: {{ $type }}}
      {{ end }}
      containerStatuses:
      {{ range .spec.containers }}
      - image: {{ .image | Quote }}
        imageID: ""
        name: {{ .name | Quote }}
        ready: true
        started: true
        restartCount: 0
        state: {running: {startedAt: {{ $now | Quote }}}}
      {{ end }}
      initContainerStatuses:
      {{ range .spec.initContainers }}
      - image: {{ .image | Quote }}
        imageID: ""
        name: {{ .name | Quote }}
        ready: true
        restartCount: 0
        state:
          terminated:
            exitCode: 0
            reason: Completed
            startedAt: {{ $now | Quote }}
            finishedAt: {{ $now | Quote }}
      {{ end }}
      phase: Running
      startTime: {{ $now | Quote }}
---
apiVersion: kwok.x-k8s.io/v1alpha1
kind: Stage
metadata: {name: pod-ended}
spec:
  resourceRef: {apiGroup: v1, kind: Pod}
  selector:
    matchExpressions:
    - {key: .metadata.deletionTimestamp, operator: DoesNotExist}
    - {key: .status.phase, operator: In, values: [Running]}
    - {key: '.metadata.annotations["EXIT"]', operator: Exists}
  delay:
    durationMilliseconds: 0
    durationFrom: {expressionFrom: '.metadata.annotations["ENDS"]'}
  next:
    statusTemplate: |
      {{ $now := Now }}
      {{ $root := . }}
      {{ $code := index .metadata.annotations "EXIT" }}
      conditions:
      {{ range $type := list "Ready" "ContainersReady" }}
      - {lastTransitionTime: {{ $now | Quote }}, status: "False", type: {{ $type }}, reason: PodCompleted}
      {{ end }}
      containerStatuses:
      {{ range .spec.containers }}
      - image: {{ .image | Quote }}
        imageID: ""
        name: {{ .name | Quote }}
        ready: false
        started: false
        restartCount: 0
        state:
          terminated:
            exitCode: {{ $code }}
            reason: {{ if eq $code "0" }}Completed{{ else }}Error{{ end }}
            startedAt: {{ $root.status.startTime | Quote }}
            finishedAt: {{ $now | Quote }}
      {{ end }}
      phase: {{ if eq $code "0" }}Succeeded{{ else }}Failed{{ end }}
---
apiVersion: kwok.x-k8s.io/v1alpha1
kind: Stage
metadata: {name: pod-gone}
spec:
  resourceRef: {apiGroup: v1, kind: Pod}
  selector:
    matchExpressions:
    - {key: .metadata.deletionTimestamp, operator: Exists}
  next:
    delete: true
"""


@dataclass(frozen=True)
class Hollow:
    """The hollow nodes of one test.

    Attributes:
        cluster: the cluster.
        name: the value of the nodes' label.
    """

    cluster: Cluster
    name: str

    @property
    def place(self) -> dict[str, Any]:
        """The fields of a pod's spec that place the pod on these nodes."""
        return {"nodeSelector": {LABEL: self.name}, "tolerations": [{"operator": "Exists"}]}

    def end(self, namespace: str, pods: Iterable[str], code: int = 0) -> None:
        """End running pods with an exit code, in any order; return when all are patched, before they end."""
        change = {"metadata": {"annotations": {EXIT: str(code)}}}
        with space.connect(kubeconfig()) as api:
            tell = partial(client.CoreV1Api(api).patch_namespaced_pod, namespace=namespace, body=change)
            _all_at_once(tell, pods)


@contextmanager
def nodes(cluster: Cluster, count: int, kubelet: tuple[str, int] | None = None) -> Iterator[Hollow]:
    """Create hollow nodes and wait until all are ready. At the end, delete them and their pods.

    Args:
        cluster: the cluster; other tests may use it meanwhile.
        count: the number of nodes.
        kubelet: address and port of the server with the logs of their pods; None: the pods have no logs.
    """
    _remove_orphans(cluster)
    hollow = Hollow(cluster, f"{os.getpid()}-{secrets.token_hex(3)}")
    try:
        _start(hollow)
        items = [_node(hollow.name, number, kubelet) for number in range(count)]
        cluster.kubectl(*_CREATE, stdin=_list(items), seconds=READY_SECONDS)
        wait_for("hollow nodes to be ready", lambda: _ready(hollow) == count, seconds=READY_SECONDS)
        yield hollow
    finally:
        _remove(cluster, hollow.name)


def _start(hollow: Hollow) -> None:
    program, file = _program(hollow.name), f"{_program(hollow.name)}.yaml"
    (run_folder() / file).write_text(_STAGES.replace("EXIT", EXIT).replace("ENDS", ENDS))
    options = [
        f"--kubeconfig={INNER}/admin.kubeconfig",
        f"--config={INNER}/{file}",
        f"--manage-nodes-with-label-selector={LABEL}={hollow.name}",
        f"--node-lease-duration-seconds={LEASE_SECONDS}",
    ]
    hollow.cluster.namespace.start(program, [hollow.cluster.modules["kwok"].program("kwok"), *options])


def _program(name: str) -> str:
    return f"kwok-{name}"


def _node(name: str, number: int, kubelet: tuple[str, int] | None) -> dict[str, Any]:
    status: dict[str, Any] = {"capacity": CAPACITY, "allocatable": CAPACITY}
    if kubelet is not None:
        address, port = kubelet
        status["addresses"] = [{"type": "InternalIP", "address": address}]
        status["daemonEndpoints"] = {"kubeletEndpoint": {"Port": port}}
    # Their own zone: the number of lost nodes in a zone decides how fast the pods in it are evicted.
    labels = {LABEL: name, "topology.kubernetes.io/zone": "hollow", "kubernetes.io/os": "linux"}
    host = f"hollow-{name}-{number:03}"
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": host, "labels": labels | {"kubernetes.io/hostname": host}},
        "spec": {"taints": [{"key": LABEL, "value": name, "effect": "NoSchedule"}]},
        "status": status,
    }


def _list(items: list[dict[str, Any]]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items})


def _ready(hollow: Hollow) -> int:
    words = 'jsonpath={.items[*].status.conditions[?(@.type=="Ready")].status}'
    told = hollow.cluster.kubectl("get", "nodes", f"--selector={LABEL}={hollow.name}", "--output", words)
    return told.split().count("True")


def _remove_orphans(cluster: Cluster) -> None:
    """Remove the hollow nodes of tests whose process no longer exists."""
    found = cluster.kubectl("get", "nodes", f"--selector={LABEL}", "--output", "json")
    names = {item["metadata"]["labels"][LABEL] for item in json.loads(found)["items"]}
    names |= {path.name.removeprefix("kwok-") for path in (run_folder() / "pids").glob("kwok-*")}
    for name in names:
        if not psutil.pid_exists(int(name.partition("-")[0])):
            _remove(cluster, name)


def _remove(cluster: Cluster, name: str) -> None:
    with space.connect(kubeconfig()) as api:
        core = client.CoreV1Api(api)
        core.delete_collection_node(label_selector=f"{LABEL}={name}")
        _delete_pods(core, name)
    with suppress(FileNotFoundError):  # KWOK was never started
        cluster.namespace.stop(_program(name))
    (run_folder() / f"{_program(name)}.yaml").unlink(missing_ok=True)


def _delete_pods(core: client.CoreV1Api, name: str) -> None:
    """Delete the pods of these nodes at once: a hollow node has no kubelet that ends them."""
    every = core.list_pod_for_all_namespaces(field_selector="spec.nodeName!=").items
    ours = [pod.metadata for pod in every if pod.spec.node_name.startswith(f"hollow-{name}-")]

    def delete(pod: Any) -> None:
        core.delete_namespaced_pod(pod.name, pod.namespace, grace_period_seconds=0)

    _all_at_once(delete, ours)


def _all_at_once(call: Callable[[Any], object], items: Iterable[Any]) -> None:
    """Call the function for each item, a few in parallel. Ignore objects that no longer exist."""

    def tried(item: Any) -> None:
        try:
            call(item)
        except ApiException as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise

    with ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(tried, items))
