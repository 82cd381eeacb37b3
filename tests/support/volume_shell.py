"""Inspect the volume of a run on Kubernetes, from a pod that mounts it."""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.command import wait_for
from cluster.space import Space

from manycpu.pipeline.targets.kubernetes.context import ClusterContext, cluster_of
from manycpu.pipeline.targets.kubernetes.volume import claims, helper_pod


def quiet(*_: int) -> None:
    return


@contextmanager
def shell(ctx: ClusterContext, namespace: Space) -> Iterator[Callable[..., str]]:
    """Yield a function that runs commands in a pod with the volume; Pod Security `restricted` accepts it."""
    claim, image = claims.ensure_claim(ctx), str(ctx.target.helper_image)
    made = helper_pod.manifest(ctx, "shell", claim, image, ctx.ledger.owner())
    made["spec"]["containers"][0]["command"] = ["sleep", "600"]
    name = namespace.create(made)["metadata"]["name"]
    namespace.wait_pod(name, "Running")
    try:
        yield lambda *words: namespace.run(name, *words)
    finally:
        cluster_of(ctx).delete("Pod", name, grace=0)


def sums(run: Callable[..., str], folder: str) -> dict[str, str]:
    """Return the sha256 of each file below a folder of the volume: path -> checksum."""
    program = "import hashlib, json, pathlib, sys; root = pathlib.Path(sys.argv[1]); print(json.dumps({"
    program += "str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() "
    program += "for p in root.rglob('*') if p.is_file()}))"
    found: dict[str, str] = json.loads(run("python3", "-c", program, folder))
    return found


def sums_here(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def no_pod_is_left(ctx: ClusterContext) -> None:
    wait_for("the helper pod to be gone", lambda: not pods(ctx), seconds=30)


def pods(ctx: ClusterContext) -> list[str]:
    return [pod["metadata"]["name"] for pod in cluster_of(ctx).list("Pod", {"manycpu/run": ctx.name})]
