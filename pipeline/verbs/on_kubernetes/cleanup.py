"""On Kubernetes the ledger owns what a run creates; on the volume a run has a folder."""

import time
from contextlib import suppress
from typing import cast

from manycpu.pipeline.adapters.cluster import Cluster
from manycpu.pipeline.ledger.configmap import expired
from manycpu.pipeline.spec.errors import ManycpuError
from manycpu.pipeline.spec.naming import labels
from manycpu.pipeline.transfer import TransferError
from manycpu.pipeline.verbs.context import ClusterContext, reopen
from manycpu.pipeline.verbs.on_kubernetes.gone import named, present, wait_until_gone
from manycpu.pipeline.verbs.on_kubernetes.helper import helper
from manycpu.pipeline.verbs.on_kubernetes.report import remove_forgotten

__all__ = ["keep", "owns", "remove", "remove_expired"]

_TIMEOUT = 120.0  # seconds until all that the run owned must be gone
_LAST = ("ConfigMap", "PersistentVolumeClaim")  # the ledger; the claim goes with it, after its last pod


def keep(ctx: ClusterContext) -> list[str]:
    """Name what is kept, and note until when."""
    ctx.ledger.keep_until(time.time() + ctx.run.keep_for)
    return named(ctx, present(ctx, labels(ctx.name)))


def owns(ctx: ClusterContext, what: str) -> bool:
    """Whether something goes with the run: on a claim that was made for it, all does."""
    return ctx.target.claim is None and what.startswith(f"{ctx.target.mount_path}/")


def remove(ctx: ClusterContext) -> list[str]:
    """Delete what the run owns, and wait until it is gone; what is left."""
    left = _remove_elsewhere(ctx)
    for item in present(ctx, labels(ctx.name)):
        if item["kind"] not in _LAST:
            ctx.cluster.delete(item["kind"], item["metadata"]["name"], uid=item["metadata"]["uid"])
    left += _remove_folder(ctx)
    ctx.ledger.remove()
    return left + wait_until_gone(ctx, labels(ctx.name), _TIMEOUT)


def remove_expired(ctx: ClusterContext, now: float) -> list[str]:
    """Delete what was kept of older runs, where its time is over; the names of the runs."""
    names = []
    for ledger in expired(ctx.cluster, now):
        with suppress(ManycpuError):  # the next run tries again
            remove(cast("ClusterContext", reopen(ledger.read(), access=ctx.access)))
            names.append(ledger.name)
    with suppress(ManycpuError):
        remove_forgotten(ctx.cluster)
    return names


def _remove_folder(ctx: ClusterContext) -> list[str]:
    """Delete the run's folder on a claim that was there before the run; its own claim goes as a whole."""
    if ctx.target.claim is None or ctx.ledger.read().attempt == 0:
        return []
    try:
        with helper(ctx, "cleanup", ctx.claim, lambda *_: None) as pod:
            pod.ask("remove", folder=ctx.directory)
    except (TransferError, ManycpuError) as error:
        return [f"{ctx.directory} on claim {ctx.target.namespace}/{ctx.claim}: {error}"]
    return []


def _remove_elsewhere(ctx: ClusterContext) -> list[str]:
    """Delete what is in another namespace: owners do not reach there."""
    left = []
    for name in ctx.ledger.read().elsewhere:
        namespace, kind, item = name.split("/")
        there = ctx.cluster.in_namespace(namespace)
        there.delete(kind, item)
        left += [name] if there.get(kind, item) and not _goes(there, kind, item) else []
    return left


def _goes(cluster: Cluster, kind: str, name: str) -> bool:
    found = cluster.get(kind, name)
    return found is None or "deletionTimestamp" in found["metadata"]
