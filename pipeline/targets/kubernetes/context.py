"""A run on Kubernetes: its cluster, its claim and its folders on the volume."""

from functools import partial
from typing import TypeAlias

from typing_extensions import TypeIs

from manycpu.pipeline.adapters import cluster
from manycpu.pipeline.adapters.cluster import Cluster
from manycpu.pipeline.ledger.configmap import ConfigMapLedger
from manycpu.pipeline.spec.kube_object import is_being_deleted
from manycpu.pipeline.spec.targets import Kubernetes
from manycpu.pipeline.targets.context import Access, RunContext

ClusterContext: TypeAlias = RunContext[Kubernetes, ConfigMapLedger]


def is_on_kubernetes(ctx: RunContext) -> TypeIs[ClusterContext]:
    """Whether a run is on Kubernetes."""
    return isinstance(ctx.target, Kubernetes)


def cluster_of(ctx: ClusterContext) -> Cluster:
    """Return the cluster client for the run's namespace; all runs with the same ``access`` share it.

    Raises:
        ClusterError: No cluster can be reached.
    """
    opened, namespace = ctx.access.opened, ctx.target.namespace
    if namespace not in opened:
        connect = ctx.access.connect or partial(cluster.connect, ctx.target.connection)
        opened[namespace] = Cluster(connect, namespace)
    client: Cluster = opened[namespace]
    return client


def sharing(client: Cluster) -> Access:
    """Make an ``access`` for several runs of one namespace, so that all of them use this client."""
    return Access(opened={client.namespace: client})


def claim_of(ctx: ClusterContext) -> str:
    """Return the name of the run's PersistentVolumeClaim: ``target.claim``, or the one made for the run."""
    return ctx.target.claim or f"{ctx.name}-data"


def is_readable(ctx: ClusterContext) -> bool:
    """Whether the claim may have files, and a new pod can mount it.

    False: the claim does not exist, has no volume yet (no pod has written to it), or is being deleted (no new
    pod can mount it).
    """
    claim = cluster_of(ctx).get("PersistentVolumeClaim", claim_of(ctx))
    if claim is None or is_being_deleted(claim):
        return False
    return bool(claim.get("status", {}).get("phase") != "Pending")  # pending: it has no volume yet


def directory_of(ctx: ClusterContext) -> str:
    """Return the run's own folder on the volume."""
    return f"{ctx.target.home}/runs/{ctx.name}"


def attempt_directory(ctx: ClusterContext, attempt: int) -> str:
    """Return the folder of one attempt on the volume."""
    return f"{directory_of(ctx)}/attempts/{attempt}"
