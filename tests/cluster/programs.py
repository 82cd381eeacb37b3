"""Everything that runs in the cluster, built or unpacked into the cache, each once."""

import shutil

from cluster import debian, go
from cluster.command import run
from cluster.modules import Module, chosen

# Operators: the module whose manifests/overlays/standalone has their CRDs, roles and Deployment.
MANIFESTS = {
    "training-operator": "github.com/kubeflow/training-operator",
    "mpi-operator": "github.com/kubeflow/mpi-operator",
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
    _forget_sources()
    return modules


def _build(module: Module, kubernetes: Module | None = None) -> None:
    """Build into a folder beside the final one, so that half a build never looks like a whole one."""
    if module.built.exists():
        return
    part = module.built.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    go.install(module, part / "bin")
    if module.component in MANIFESTS and kubernetes:
        overlay = go.source(module, MANIFESTS[module.component]) / "manifests" / "overlays" / "standalone"
        manifests = run([kubernetes.program("kubectl"), "kustomize", overlay])
        (part / "manifests.yaml").write_text(manifests)
    part.rename(module.built)


def missing() -> list[Module]:
    """The modules that must still be built."""
    return [module for module in chosen().values() if not module.built.exists()]


def _forget_sources() -> None:
    """Remove Go's downloads and intermediate files: gigabytes that only a new version needs again."""
    for folder in go.working_folders():
        shutil.rmtree(folder, ignore_errors=True)
