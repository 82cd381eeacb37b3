"""Kubeflow's operators: their own manifests, changed to run from our registry and to be ready at once."""

import json
from collections.abc import Callable
from typing import Any

import yaml
from cluster import images
from cluster.modules import Module
from cluster.programs import MANIFESTS

NAMESPACES = {"training-operator": "kubeflow", "mpi-operator": "mpi-operator"}
READY_SECONDS = 120
Kubectl = Callable[..., str]


def install(kubectl: Kubectl, modules: dict[str, Module]) -> None:
    """Install all operators and wait until they work."""
    for name in MANIFESTS:
        documents = [_adapt(name, document) for document in _documents(name, modules[name])]
        everything = {"apiVersion": "v1", "kind": "List", "items": documents}
        kubectl("apply", "--server-side", "--filename", "-", stdin=json.dumps(everything))
    for name, namespace in NAMESPACES.items():
        wait_ready(kubectl, name, namespace)


def wait_ready(kubectl: Kubectl, name: str, namespace: str) -> None:
    timeout = f"--timeout={READY_SECONDS}s"
    kubectl("-n", namespace, "rollout", "status", f"deployment/{name}", timeout, seconds=READY_SECONDS + 5)


def _documents(name: str, module: Module) -> list[dict[str, Any]]:
    """The operator's manifests, without the kinds of job that are not used here.

    mpi-operator's MPIJob v2beta1 and training-operator's v1 have one CRD name: only the first is installed.
    """
    # The C loader: CRDs are long.
    documents = yaml.load_all((module.built / "manifests.yaml").read_text(), yaml.CSafeLoader)
    return [d for d in documents if name != "training-operator" or _is_wanted(d)]


def _is_wanted(document: dict[str, Any]) -> bool:
    is_crd = document["kind"] == "CustomResourceDefinition"
    return not is_crd or document["metadata"]["name"] == "pytorchjobs.kubeflow.org"


def _adapt(name: str, document: dict[str, Any]) -> dict[str, Any]:
    if document["kind"] == "ValidatingWebhookConfiguration":
        document["webhooks"] = [hook for hook in document["webhooks"] if "pytorchjob" in hook["name"]]
    if document["kind"] == "Deployment":
        _adapt_container(name, document["spec"]["template"]["spec"]["containers"][0])
    return document


def _adapt_container(name: str, container: dict[str, Any]) -> None:
    container["image"] = images.reference(name)
    container["imagePullPolicy"] = "IfNotPresent"
    container["command"] = [f"/{images.STATIC[name]}"]
    if probe := container.get("readinessProbe"):
        probe |= {"initialDelaySeconds": 0, "periodSeconds": 1}
    if name == "training-operator":
        wait_image = f"--pytorch-init-container-image={images.reference('base')}"
        container["args"] = ["--enable-scheme=pytorchjob", wait_image]
