"""The manifests of helper pods and claims are what a namespace with Pod Security ``restricted`` takes."""

import json
from pathlib import Path
from typing import Any

from manycpu.pipeline.verbs.context import ClusterContext, open_context
from manycpu.pipeline.verbs.on_kubernetes import helper, volume

GOLDEN = Path(__file__).parent / "golden"
OWNERS = [{"apiVersion": "v1", "kind": "ConfigMap", "name": "qa-8a2b1c0d9e", "uid": "5f0c"}]


def context(**target: Any) -> ClusterContext:
    run = {
        "program": "question_answering",
        "output": "./out",
        "env": {"HF_ENDPOINT": "https://hub.example", "PYTHONPATH": "/mine"},
        "env_from": ["hub-token"],
        "job_name": "qa",
    }
    made = open_context(run, {"kind": "kubernetes", **target}, "golden", base=Path("/"))
    assert isinstance(made, ClusterContext)
    return made


def test_the_helper_pod_is_as_agreed() -> None:
    ctx = context(
        node_selector={"pool": "cpu"},
        tolerations=[{"key": "training", "operator": "Exists"}],
        pull_secret="registry",  # noqa: S106 - a secret's name
        pull_policy="IfNotPresent",
    )
    made = helper.manifest(ctx, "stage", "training-data", "registry.example/helper@sha256:0", OWNERS)
    assert made == json.loads((GOLDEN / "helper-pod.json").read_text())


def test_the_claim_is_as_agreed() -> None:
    ctx = context(claim_size="5Gi", storage_class="shared")
    assert volume.claim(ctx.name, ctx.target, OWNERS) == json.loads((GOLDEN / "claim.json").read_text())


def test_a_claim_of_the_default_class_names_none() -> None:
    ctx = context()
    assert "storageClassName" not in volume.claim(ctx.name, ctx.target, OWNERS)["spec"]


def test_what_keeps_a_pod_from_running_is_said() -> None:
    waiting = {"reason": "InvalidImageName", "message": "couldn't parse image name"}
    pod = {
        "metadata": {"name": "x"},
        "status": {"phase": "Pending", "containerStatuses": [{"state": {"waiting": waiting}}]},
    }
    assert helper.pending(pod) == ("InvalidImageName: couldn't parse image name", True)
    unscheduled = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/2 nodes",
    }
    pod["status"] = {"phase": "Pending", "conditions": [unscheduled]}
    assert helper.pending(pod) == ("Unschedulable: 0/2 nodes", False)
