"""The objects of a run on Kubernetes as launchers write them, and functions that read parts of them."""

from collections.abc import Iterator
from typing import Any

from manycpu.pipeline.launchers import JOB_LAUNCHERS
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.spec.placement import CODE, Placement
from manycpu.pipeline.spec.targets import Kubernetes
from manycpu.pipeline.spec.training_run import TrainingRun

OWNER = {"apiVersion": "v1", "kind": "ConfigMap", "name": "train-0123456789", "uid": "0b1c"}
MANY_FIELDS: KubeObject = {
    "node_selector": {"pool": "training"},
    "tolerations": [{"key": "training", "operator": "Exists", "effect": "NoSchedule"}],
    "priority_class": "batch",
    "queue": "team-a",
    "service_account": "trainer",
    "pull_secret": "registry-login",
    "pull_policy": "Always",
    "mount_path": "/data",
}


def run(**fields: Any) -> TrainingRun:
    usual = {
        "program": "train.py",
        "args": ["--data", "{data}", "--out", "{output}", "--keep", "{x}"],
        "output": "/models/qa",
        "nnodes": 2,
        "nproc_per_node": 2,
        "resources": {"cpu": 4, "memory": "8Gi"},
    }
    return TrainingRun(**usual | fields)


def target(launch: str = "pytorchjob", **fields: Any) -> Kubernetes:
    own = {"runtime": "own"} if launch == "trainjob" else {}
    return Kubernetes.model_validate({"launch": launch, "namespace": "ml"} | own | fields)


def place(mount: str = "/tmp/pvc-mount", **fields: Any) -> Placement:  # noqa: S108 - path in a pod
    home = f"{mount}/manycpu"
    usual = {
        "name": "train-0123456789",
        "attempt": 1,
        "python": "python3",
        "code": CODE,
        "program": ("train.py",),
        "data": f"{home}/data/ab12",
        "model": f"{home}/model/cd34",
        "output": f"{home}/runs/train-0123456789/attempts/1/output",
        "checkpoints": f"{home}/runs/train-0123456789/checkpoints",
        "caches": f"{home}/caches",
        "attempt_directory": f"{home}/runs/train-0123456789/attempts/1",
        "image": "registry.example/ml/train@sha256:0123",
        "claim": "training-data",
        "owners": (OWNER,),
    }
    return Placement.model_validate(usual | fields)


def objects(launch: str = "pytorchjob", on: KubeObject | None = None, **fields: Any) -> list[KubeObject]:
    """Return the objects that a run creates; its job is the last."""
    where = target(launch, **(on or {}))
    return JOB_LAUNCHERS[launch].objects(run(**fields), where, place(where.mount_path))


def manifest(launch: str = "pytorchjob", on: KubeObject | None = None, **fields: Any) -> KubeObject:
    """Return the manifest of a run's job."""
    return objects(launch, on, **fields)[-1]


def fields_named(name: str, value: Any) -> Iterator[Any]:
    """Yield all values of a field, at any depth."""
    if isinstance(value, dict):
        yield from (inner for key, inner in value.items() if key == name)
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from fields_named(name, inner)


def templates(written: Any) -> dict[str, KubeObject]:
    """Return the pod templates in objects: role -> template."""
    pods = [one for one in fields_named("template", written) if "containers" in one["spec"]]
    return {one["metadata"]["labels"]["manycpu/role"]: one for one in pods}


def pod(written: Any, role: str = "rank") -> KubeObject:
    return dict(templates(written)[role]["spec"])


def container(written: Any, role: str = "rank") -> KubeObject:
    (only,) = pod(written, role)["containers"]
    return dict(only)


def variables(written: Any, role: str = "rank") -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container(written, role)["env"] if "value" in entry}


def command(written: Any, role: str = "rank") -> list[str]:
    return list(container(written, role)["command"])


def annotation(written: Any, role: str, name: str) -> str:
    return str(templates(written)[role]["metadata"]["annotations"][f"manycpu/{name}"])
