"""Kubeflow's operators and Kueue.

Their manifests are changed: images come from the tests' registry, and operators become ready without delay.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import yaml
from cluster import cgroups, images
from cluster.command import ClusterError, tail, wait_for
from cluster.modules import Module
from cluster.programs import MANIFESTS


@dataclass(frozen=True)
class Place:
    """Namespace and name of an operator's Deployment."""

    namespace: str
    deployment: str


# Operator's image -> place.
PLACES = {
    "training-operator": Place("kubeflow", "training-operator"),
    "mpi-operator": Place("mpi-operator", "mpi-operator"),
    "trainer": Place("kubeflow-system", "kubeflow-trainer-controller-manager"),
    "jobset": Place("kubeflow-system", "jobset-controller-manager"),
    "kueue": Place("kueue-system", "kueue-controller-manager"),
}
# The kinds of job that Kueue admits -> Kueue's names of them. A TrainJob creates a JobSet.
QUEUED = {
    "pytorchjob": "kubeflow.org/pytorchjob",
    "mpijob": "kubeflow.org/mpijob",
    "trainjob": "trainer.kubeflow.org/trainjob",
    "jobset": "jobset.x-k8s.io/jobset",
}
KUEUE_OBJECTS = ("clusterqueue", "cohort", "resourceflavor", "workload")
READY_SECONDS = 120
WEBHOOK_SECONDS = 20  # twice the default: on a busy machine an operator answers late
NOBODY = 65534
RUNTIME = "torch-distributed"  # the name of Trainer's own runtime
Kubectl = Callable[..., str]
# The server validates, not kubectl, which would request all schemas: a new API server makes them slowly.
_APPLY = ("apply", "--server-side", "--validate=false", "--filename", "-")


def install(kubectl: Kubectl, modules: dict[str, Module]) -> None:
    """Install all operators and wait until they work."""
    for name in MANIFESTS:
        documents = [_adapt(document) for document in _documents(name, modules[name])]
        everything = {"apiVersion": "v1", "kind": "List", "items": documents}
        kubectl(*_APPLY, stdin=json.dumps(everything))
    for name in PLACES:
        wait_ready(kubectl, name)
    wait_for(f"the runtime {RUNTIME} to be accepted", lambda: _add_runtime(kubectl), seconds=READY_SECONDS)


def _add_runtime(kubectl: Kubectl) -> str:
    """Add Trainer's runtime; return "" if its webhook is not reachable yet.

    A webhook becomes reachable a moment after its operator is ready.
    """
    try:
        return kubectl(*_APPLY, stdin=json.dumps(_runtime()))
    except ClusterError as error:
        if "failed to call webhook" in str(error):
            return ""
        raise


def wait_ready(kubectl: Kubectl, name: str) -> None:
    place, timeout = PLACES[name], f"--timeout={READY_SECONDS}s"
    rollout = ("rollout", "status", f"deployment/{place.deployment}", timeout)
    try:
        kubectl("--namespace", place.namespace, *rollout, seconds=READY_SECONDS + 5)
    except ClusterError as error:
        events = kubectl("--namespace", place.namespace, "get", "events")
        raise ClusterError(f"{error}\n{tail(events)}\n{_last_words(kubectl, place)}") from None
    _favor(kubectl, place)


def wait_ready_again(kubectl: Kubectl) -> None:
    """Wait until all operators work after a fault.

    Kubernetes restarts a pod that ended often only after minutes: such a pod is replaced.
    """
    for name, place in PLACES.items():
        ready = partial(_is_ready, kubectl, place)
        wait_for(f"{name} to be ready again", ready, seconds=READY_SECONDS, every=1)
        _favor(kubectl, place)


def pods(kubectl: Kubectl, place: Place) -> list[dict[str, Any]]:
    """Return the pods of an operator, also those that are being deleted."""
    found = json.loads(kubectl("--namespace", place.namespace, "get", "pods", "--output", "json"))["items"]
    return [pod for pod in found if pod["metadata"]["name"].startswith(f"{place.deployment}-")]


def _favor(kubectl: Kubectl, place: Place) -> None:
    """Give an operator enough processor time beside pods that compute.

    It requests little, so that the tests' runs fit on the nodes. Beside pods that request a hundred times as
    much, it would answer a webhook later than the API server waits.
    """
    for pod in pods(kubectl, place):
        if node := pod["spec"].get("nodeName"):
            cgroups.favor(node, pod["metadata"]["uid"])


def _is_ready(kubectl: Kubectl, place: Place) -> bool:
    """Return whether an operator has a ready pod; delete its pods that wait for a restart after crashes."""
    own = pods(kubectl, place)
    for pod in own:
        states = [one["state"] for one in pod["status"].get("containerStatuses", ())]
        if any(state.get("waiting", {}).get("reason") == "CrashLoopBackOff" for state in states):
            name = pod["metadata"]["name"]
            kubectl("--namespace", place.namespace, "delete", "pod", name, "--wait=false")
    present = [pod for pod in own if "deletionTimestamp" not in pod["metadata"]]
    conditions = [one for pod in present for one in pod["status"].get("conditions", ())]
    return any((one["type"], one["status"]) == ("Ready", "True") for one in conditions)


def _last_words(kubectl: Kubectl, place: Place) -> str:
    """Return the last log lines of the operator's container: of the previous one if it was restarted."""
    words = ("--namespace", place.namespace, "logs", f"deployment/{place.deployment}", "--tail=20")
    for which in (("--previous",), ()):
        try:
            return kubectl(*words, *which)
        except ClusterError as error:
            last = str(error)
    return last


def _documents(name: str, module: Module) -> list[dict[str, Any]]:
    """Return the operator's manifests, without CRDs that the tests do not use.

    MPIJob v2beta1 of mpi-operator and v1 of training-operator share one CRD name: only v2beta1 is installed.
    """
    documents = json.loads((module.built / "manifests.json").read_text())
    return [d for d in documents if name != "training-operator" or _is_wanted(d)]


def _is_wanted(document: dict[str, Any]) -> bool:
    is_crd = document["kind"] == "CustomResourceDefinition"
    return not is_crd or document["metadata"]["name"] == "pytorchjobs.kubeflow.org"


def _adapt(document: dict[str, Any]) -> dict[str, Any]:
    """Change a manifest for the test cluster: webhooks, Kueue's kinds of job, leader election, containers."""
    name = document["metadata"]["name"]
    if document["kind"] == "ValidatingWebhookConfiguration" and "training-operator" in name:
        document["webhooks"] = [hook for hook in document["webhooks"] if "pytorchjob" in hook["name"]]
    if document["kind"].endswith("WebhookConfiguration"):
        if name.startswith("kueue-"):
            document["webhooks"] = [hook for hook in document["webhooks"] if _is_of_kueue(hook["name"])]
        for hook in document["webhooks"]:
            hook["timeoutSeconds"] = WEBHOOK_SECONDS
    if name == "kueue-manager-config":
        _adapt_kueue(document["data"])
    # Without leader election, a Deployment's one replica need not wait until an old lease expires.
    if document["kind"] == "ConfigMap":
        document["data"] = {
            key: text.replace("leaderElect: true", "leaderElect: false")
            for key, text in document.get("data", {}).items()
        }
    if document["kind"] == "Deployment":
        operator = next(key for key, place in PLACES.items() if place.deployment == name)
        _adapt_container(operator, document["spec"]["template"]["spec"]["containers"][0])
    return document


def _is_of_kueue(hook: str) -> bool:
    # Hooks have names like mpytorchjob.kb.io and vworkload.kb.io.
    return hook.removesuffix(".kb.io")[1:] in {*QUEUED, *KUEUE_OBJECTS}


def _adapt_kueue(files: dict[str, str]) -> None:
    """Limit Kueue to the jobs in QUEUED, so that it does not manage every pod of the cluster."""
    for name, text in files.items():
        config = yaml.safe_load(text)
        config["integrations"]["frameworks"] = [*QUEUED.values()]
        files[name] = yaml.safe_dump(config).replace("leaderElect: true", "leaderElect: false")


def _adapt_container(name: str, container: dict[str, Any]) -> None:
    _, program = images.STATIC[name]
    container["image"] = images.reference(name)
    container["imagePullPolicy"] = "IfNotPresent"
    container["command"] = [f"/{program}"]
    # Without a request it would get no processor time beside a pod that has one and computes.
    container["resources"] = {"requests": {"cpu": "10m"}}
    container.setdefault("securityContext", {})["runAsUser"] = NOBODY  # the test images set no user
    container.pop("livenessProbe", None)
    if probe := container.get("readinessProbe"):
        # Ready at once, and also on a busy machine: a service without a ready pod refuses connections.
        probe |= {"initialDelaySeconds": 0, "periodSeconds": 1, "timeoutSeconds": 10, "failureThreshold": 30}
    if name == "training-operator":
        wait_image = f"--pytorch-init-container-image={images.reference('base')}"
        container["args"] = ["--enable-scheme=pytorchjob", wait_image]


def _runtime() -> dict[str, Any]:
    """Return a ClusterTrainingRuntime like Trainer's own for torch, with the test image."""
    container = {"name": "node", "image": images.reference("torch")}
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    job = {"metadata": {"labels": labels}, "spec": {"template": {"spec": {"containers": [container]}}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "ClusterTrainingRuntime",
        "metadata": {"name": RUNTIME, "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": 1, "torch": {}},
            "template": {"spec": {"replicatedJobs": [{"name": "node", "template": job}]}},
        },
    }
