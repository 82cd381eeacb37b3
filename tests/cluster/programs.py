"""Build or unpack all programs of the cluster into the cache, each once."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from cluster import debian, go
from cluster.command import run
from cluster.modules import Module, chosen


@dataclass(frozen=True)
class Manifests:
    """Where a component's CRDs, roles, webhooks and Deployments come from.

    Attributes:
        folders: Go module -> kustomizations in its source.
        more: further fields of the kustomization that combines them.
    """

    folders: Mapping[str, tuple[str, ...]]
    more: Mapping[str, Any] = field(default_factory=dict)


_TRAINER_PARTS = ("crds", "manager", "rbac", "webhook")
MANIFESTS = {
    "training-operator": Manifests(
        {"github.com/kubeflow/training-operator": ("manifests/overlays/standalone",)}
    ),
    "mpi-operator": Manifests({"github.com/kubeflow/mpi-operator": ("manifests/overlays/standalone",)}),
    # Trainer's own overlay downloads JobSet's manifests from the internet; JobSet's Go module has them too.
    "trainer": Manifests(
        {
            "github.com/kubeflow/trainer/v2": tuple(f"manifests/base/{part}" for part in _TRAINER_PARTS),
            "sigs.k8s.io/jobset": ("config/default",),
        },
        {
            "namespace": "kubeflow-system",
            "secretGenerator": [
                {"name": "kubeflow-trainer-webhook-cert", "options": {"disableNameSuffixHash": True}}
            ],
        },
    ),
    "kueue": Manifests({"sigs.k8s.io/kueue": ("config/default",)}),
}


def ensure() -> dict[str, Module]:
    """Build every program of the chosen versions that the cache lacks.

    Returns:
        the modules by component, all built.
    """
    modules = chosen()
    debian.ensure()
    _build(modules["kubernetes"])
    for module in modules.values():
        _build(module, kubernetes=modules["kubernetes"])
    return modules


def _build(module: Module, kubernetes: Module | None = None) -> None:
    """Build a module into a temporary folder and rename it, so that an incomplete build is never used."""
    if module.built.exists():
        return
    part = module.built.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    go.install(module, part / "bin")
    if module.component in MANIFESTS and kubernetes:
        manifests = _kustomize(module, part / "kustomization", kubernetes)
        (part / "manifests.json").write_text(json.dumps(_without_descriptions(manifests)))
    part.rename(module.built)


def _kustomize(module: Module, folder: Path, kubernetes: Module) -> list[Any]:
    """Return all manifests of a component, by kustomize; `folder` is created for it, and removed."""
    folder.mkdir()
    kustomization = dict(MANIFESTS[module.component].more) | {"resources": []}
    for number, (path, folders) in enumerate(MANIFESTS[module.component].folders.items()):
        source = folder / f"source-{number}"
        source.symlink_to(go.source(module, path))
        kustomization["resources"] += [f"{source.name}/{name}" for name in folders]
    (folder / "kustomization.yaml").write_text(json.dumps(kustomization))
    manifests = run([kubernetes.program("kubectl"), "kustomize", folder])
    shutil.rmtree(folder)
    return list(yaml.load_all(manifests, yaml.CSafeLoader))  # the C loader is fast enough for long CRDs


def _without_descriptions(part: Any) -> Any:
    """Return manifests without field descriptions: they fill most of a CRD, and slow the API server down."""
    if isinstance(part, list):
        return [_without_descriptions(each) for each in part]
    if not isinstance(part, dict):
        return part
    return {
        key: _without_descriptions(value)
        for key, value in part.items()
        if key != "description" or not isinstance(value, str)
    }


def missing() -> list[Module]:
    """Return the chosen modules that are not built yet."""
    return [module for module in chosen().values() if not module.built.exists()]


def forget_sources() -> None:
    """Remove Go's downloads and intermediate files: gigabytes that only a new version needs again."""
    run(["rm", "-rf", *go.working_folders()], seconds=600)  # several times as fast as rmtree
