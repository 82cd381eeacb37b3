"""The claim of a run: the user's, or one that the run creates and owns."""

from dataclasses import replace
from functools import partial
from typing import Final

from manycpu.pipeline.adapters.cluster import poll
from manycpu.pipeline.ledger import Entry
from manycpu.pipeline.spec.errors import ClusterError, RunGoneError
from manycpu.pipeline.spec.kube_object import KubeObject, is_being_deleted
from manycpu.pipeline.spec.naming import labels
from manycpu.pipeline.spec.targets import Kubernetes
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, claim_of, cluster_of
from manycpu.pipeline.targets.kubernetes.deletion import is_owned
from manycpu.pipeline.targets.open_run import as_started

_DELETION_TIMEOUT_S: Final = 60.0  # within which an earlier run's claim must be gone


def claim(run: str, target: Kubernetes, owners: list[KubeObject]) -> KubeObject:
    """Build the manifest of the claim that is made for a run; ``run`` is the run's name."""
    spec: KubeObject = {
        "accessModes": [target.claim_access],
        "resources": {"requests": {"storage": target.claim_size}},
    }
    if target.storage_class is not None:
        spec["storageClassName"] = target.storage_class
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": f"{run}-data", "labels": labels(run), "ownerReferences": owners},
        "spec": spec,
    }


def ensure_claim(ctx: ClusterContext) -> str:
    """Check the user's claim, or create the run's own; return its name.

    Raises:
        ClusterError: The claim does not exist, has lost its volume, is being deleted or cannot be created; or
            another claim has the name of the run's own.
    """
    name = claim_of(ctx)
    if not ctx.target.makes_claim:
        _check_usable(ctx, cluster_of(ctx).get("PersistentVolumeClaim", name))
        return name
    uid = ctx.ledger.uid()

    def is_outdated(item: KubeObject) -> bool:
        """Whether a claim goes by itself: it is in deletion, or its owner is a ledger that is gone."""
        is_of_earlier = is_owned(item, ctx.name, None) and not is_owned(item, ctx.name, uid)
        return is_of_earlier or is_being_deleted(item)

    # `create` returns the existing claim of this name: try again until that of an earlier run is gone.
    create = partial(cluster_of(ctx).create, claim(ctx.name, ctx.target, ctx.ledger.owner()))
    created = poll(create, done=lambda item: not is_outdated(item), timeout_s=_DELETION_TIMEOUT_S)
    if is_outdated(created):
        raise ClusterError(
            f"claim {ctx.target.namespace}/{name} of an earlier run is being deleted and does not go",
            fix=f"See what still uses it: kubectl -n {ctx.target.namespace} describe pvc {name}",
        )
    if not is_owned(created, ctx.name, uid):  # its files are not the run's to delete
        raise ClusterError(
            f"claim {ctx.target.namespace}/{name} exists and is not of this run",
            field="target.claim",
            fix="Delete it, give another run id, or name it here to use it",
        )
    _check_usable(ctx, created)
    return name


def with_volume_of(ctx: ClusterContext, entry: Entry, attempt: int) -> ClusterContext:
    """Return the run with the ``claim`` and ``mount_path`` with which an attempt was started.

    These fields may have been edited since. All other fields keep their present values.
    """
    target = as_started(ctx, entry, attempt).target
    if not isinstance(target, Kubernetes) or target == ctx.target:
        return ctx
    volume = {"claim": target.claim, "mount_path": target.mount_path}
    return replace(ctx, target=ctx.target.model_copy(update=volume))


def with_each_volume(ctx: ClusterContext) -> list[ClusterContext]:
    """Return one context for each volume that the run has used, or uses now.

    There may be several, as ``target.claim`` may have been edited between attempts.
    """
    entry = ctx.ledger.read()
    used = [ctx, *(with_volume_of(ctx, entry, attempt) for attempt in entry.attempts)]
    by_volume = {(each.target.claim, each.target.mount_path): each for each in used}  # each volume once
    return list(by_volume.values())


def check_exists(ctx: ClusterContext, name: str) -> None:
    """Check that the claim ``name``, which is in use, still exists.

    Raises:
        RunGoneError: The claim was deleted, or is being deleted.
    """
    claim = cluster_of(ctx).get("PersistentVolumeClaim", name)
    if claim is not None and not is_being_deleted(claim):
        return
    deletion = "is deleting" if claim else "deleted"
    raise RunGoneError(
        f"the run was taken away: somebody {deletion} "
        f"claim {ctx.target.namespace}/{name} while it was worked with",
        fix="See who cleans that namespace, and run again",
    )


def _check_usable(ctx: ClusterContext, claim: KubeObject | None) -> None:
    """Raise ClusterError if the run's claim is gone, is being deleted, or has lost its volume."""
    name = f"{ctx.target.namespace}/{claim_of(ctx)}"
    if claim is None:
        raise ClusterError(
            f"there is no PersistentVolumeClaim {name}",
            field="target.claim",
            fix="Create it, or leave the field out to have one made for the run",
        )
    if is_being_deleted(claim):
        raise ClusterError(f"claim {name} is being deleted", field="target.claim", fix="Name another one")
    if claim.get("status", {}).get("phase") == "Lost":
        raise ClusterError(
            f"claim {name} has lost its volume", field="target.claim", fix="Name another one, or restore it"
        )
