"""Preflight checks of a run's queue: Kueue's LocalQueue, and the run's priority in it."""

from collections.abc import Iterator

from manycpu.pipeline.spec.errors import Finding, ForbiddenError, NotFoundError
from manycpu.pipeline.spec.job_kinds import LOCAL_QUEUE
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, cluster_of

__all__ = ["check_queue"]

Findings = Iterator[Finding]


def check_queue(ctx: ClusterContext) -> Findings:
    """Check that the LocalQueue exists and admits jobs, and that the priority exists."""
    if (name := ctx.target.queue) is None:
        if ctx.target.queue_priority is not None:
            fix = "Set target.queue, or leave target.queue_priority out"
            yield Finding("target.queue_priority", "it is of a queue, and target.queue is left out", fix)
        return
    try:
        path = cluster_of(ctx).path(LOCAL_QUEUE.kind)
    except NotFoundError:
        yield Finding("target.queue", "the cluster has no Kueue", "Install it, or leave target.queue out")
        return
    queue = cluster_of(ctx).get(LOCAL_QUEUE.kind, name)
    if queue is None:
        where = f"in namespace {ctx.target.namespace}"
        fix = f"Name one that `kubectl -n {ctx.target.namespace} get localqueues` lists"
        yield Finding("target.queue", f"there is no LocalQueue {name!r} {where}", fix)
    elif inactive := _inactive(queue):
        text = f"LocalQueue {name!r} admits nothing at present: {inactive}"
        fix = "The run waits until it admits jobs again: ask who looks after the queue"
        yield Finding("target.queue", text, fix, fatal=False)
    yield from _queue_priority(ctx, path.partition("/namespaces/")[0])


def _inactive(queue: KubeObject) -> str:
    conditions = (queue.get("status") or {}).get("conditions") or ()
    inactive = (one for one in conditions if one["type"] == "Active" and one["status"] == "False")
    return next((f"{one.get('message', '')} ({one['reason']})".strip() for one in inactive), "")


def _queue_priority(ctx: ClusterContext, group: str) -> Findings:
    if (name := ctx.target.queue_priority) is None:
        return
    try:
        cluster_of(ctx).call("GET", f"{group}/workloadpriorityclasses/{name}")
    except NotFoundError:
        fix = "Name one that `kubectl get workloadpriorityclasses` lists"
        yield Finding("target.queue_priority", f"there is no WorkloadPriorityClass {name!r}", fix)
    except ForbiddenError:  # these objects belong to the cluster: few accounts may read them
        text = f"whether there is a WorkloadPriorityClass {name!r} could not be seen: this account may not"
        fix = "See that its name is right: Kueue lets no job wait with one that is not there"
        yield Finding("target.queue_priority", text, fix, fatal=False)
