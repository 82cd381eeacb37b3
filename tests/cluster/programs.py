"""Everything that runs in the cluster, built or unpacked into the cache, each once."""

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
    """Where a component's CRDs, roles, webhooks and Deployments are.

    Attributes:
        folders: kustomizations in the sources of Go modules, by module.
        more: what else a kustomization of all these says.
    """

    folders: Mapping[str, tuple[str, ...]]
    more: Mapping[str, Any] = field(default_factory=dict)


_TRAINER_PARTS = ("crds", "manager", "rbac", "webhook")
MANIFESTS = {
    "training-operator": Manifests(
        {"github.com/kubeflow/training-operator": ("manifests/overlays/standalone",)}
    ),
    "mpi-operator": Manifests({"github.com/kubeflow/mpi-operator": ("manifests/overlays/standalone",)}),
    # Its own overlay fetches JobSet's manifests from the internet; they are in JobSet's module too.
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
    """Build what the chosen versions need and the cache lacks.

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
    """Build into a folder beside the final one, so that half a build never looks like a whole one."""
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
    """All manifests of a component; `folder` is made for it and removed."""
    folder.mkdir()
    kustomization = dict(MANIFESTS[module.component].more) | {"resources": []}
    for number, (path, folders) in enumerate(MANIFESTS[module.component].folders.items()):
        source = folder / f"source-{number}"
        source.symlink_to(go.source(module, path))
        kustomization["resources"] += [f"{source.name}/{name}" for name in folders]
    (folder / "kustomization.yaml").write_text(json.dumps(kustomization))
    manifests = run([kubernetes.program("kubectl"), "kustomize", folder])
    shutil.rmtree(folder)
    return list(yaml.load_all(manifests, yaml.CSafeLoader))  # the C loader: CRDs are long


def _without_descriptions(part: Any) -> Any:
    """Manifests without the documentation of fields: most of a CRD, and it costs the API server."""
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
    """The modules that must still be built."""
    return [module for module in chosen().values() if not module.built.exists()]


def forget_sources() -> None:
    """Remove Go's downloads and intermediate files: gigabytes that only a new version needs again."""
    run(["rm", "-rf", *go.working_folders()], seconds=600)  # several times as fast as rmtree
