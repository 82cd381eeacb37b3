"""Wait for a run's objects to be deleted."""

from collections.abc import Callable, Iterable, Mapping

from manycpu.pipeline.adapters.cluster import poll
from manycpu.pipeline.spec.errors import ForbiddenError, NotFoundError
from manycpu.pipeline.spec.job_kinds import JOB_KINDS, resources
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, cluster_of


def kinds() -> list[str]:
    """List the kinds of objects that have a run's labels: those that manycpu creates, and its jobs' pods.

    Other objects that operators create for a job are deleted with the job.
    """
    return [*resources(), "Pod", "PersistentVolumeClaim", "ConfigMap"]


def is_companion(item: KubeObject) -> bool:
    """Whether an object is a companion of a job, such as a runtime: it stays until the run is deleted."""
    return item["kind"] in resources() and item["kind"] not in {kind.kind for kind in JOB_KINDS.values()}


def wait_until_gone(
    ctx: ClusterContext,
    selector: Mapping[str, str],
    timeout: float,
    but: Callable[[KubeObject], bool] = lambda _: False,
) -> list[str]:
    """Wait until no object has the labels, except those ``but`` selects; name what is left at the timeout."""

    def undeleted() -> list[str]:
        return named(ctx, (item for item in present(ctx, selector) if not but(item)))

    return poll(undeleted, done=lambda names: not names, timeout_s=timeout)


def present(ctx: ClusterContext, selector: Mapping[str, str]) -> list[KubeObject]:
    """List the objects with these labels, of all launch kinds: earlier attempts may have had another kind.

    Raises:
        ForbiddenError: The account may not list a kind that the run's own launch kind needs.
        NotFoundError: The cluster does not serve such a kind.
    """
    chosen = JOB_KINDS[ctx.target.launch]
    items: list[KubeObject] = []
    for kind in kinds():
        try:
            items += cluster_of(ctx).list(kind, selector)
        except (ForbiddenError, NotFoundError):
            # For other launch kinds, the cluster may lack the operator, and the account the rights: skip it.
            is_needed = kind not in resources() or resources()[kind] in (chosen.resource, *chosen.companions)
            if is_needed:
                raise
    return items


def named(ctx: ClusterContext, items: Iterable[KubeObject]) -> list[str]:
    """Return the names of objects as a report lists them: kind, namespace and name."""
    return [f"{item['kind']} {ctx.target.namespace}/{item['metadata']['name']}" for item in items]
