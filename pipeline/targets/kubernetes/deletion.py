"""Wait for a run's objects to be deleted."""

from collections.abc import Callable, Iterable, Mapping

from manycpu.pipeline.adapters.cluster import poll
from manycpu.pipeline.spec.errors import ForbiddenError, NotFoundError
from manycpu.pipeline.spec.job_kinds import JOB_KINDS, resources
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, cluster_of


def kinds() -> list[str]:
    """List the kinds of objects that have a run's labels: those that manycpu creates, and the jobs' pods.

    Kinds that only operators create, such as services, are missing: Kubernetes deletes them with the job.
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
    """Wait until no object with these labels exists, except those for which ``but`` returns true.

    Returns the names of the objects that still exist after ``timeout`` seconds; empty: all are gone.
    """

    def undeleted() -> list[str]:
        return named(ctx, (item for item in present(ctx, selector) if not but(item)))

    return poll(undeleted, done=lambda names: not names, timeout_s=timeout)


def present(ctx: ClusterContext, selector: Mapping[str, str]) -> list[KubeObject]:
    """List the objects with these labels, for all launch kinds, as earlier attempts may have had another one.

    Kinds that only other launch kinds use are skipped if the cluster lacks them or the account may not list
    them.

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
            is_needed = kind not in resources() or resources()[kind] in (chosen.resource, *chosen.companions)
            if is_needed:
                raise
    return items


def named(ctx: ClusterContext, items: Iterable[KubeObject]) -> list[str]:
    """Return the names of objects as a report lists them: ``Kind namespace/name``."""
    return [f"{item['kind']} {ctx.target.namespace}/{item['metadata']['name']}" for item in items]
