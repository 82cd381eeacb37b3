"""Wait for a run's objects to be deleted."""

from collections.abc import Callable, Iterable, Mapping

from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed

from manycpu.pipeline.spec.errors import ForbiddenError, NotFoundError
from manycpu.pipeline.spec.job_kinds import JOB_KINDS, resources
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, cluster_of

__all__ = ["is_companion", "kinds", "named", "present", "wait_until_gone"]

_EVERY = 0.25  # seconds between two looks


def kinds() -> list[str]:
    """List the kinds of object with a run's labels; what operators create besides goes with a job."""
    return [*resources(), "Pod", "PersistentVolumeClaim", "ConfigMap"]


def is_companion(item: KubeObject) -> bool:
    """Whether an object was created for a job, and stays until the run is deleted."""
    return item["kind"] in resources() and item["kind"] not in {kind.kind for kind in JOB_KINDS.values()}


def wait_until_gone(
    ctx: ClusterContext,
    selector: Mapping[str, str],
    timeout: float,
    but: Callable[[KubeObject], bool] = lambda _: False,
) -> list[str]:
    """Wait until no object in the run's namespace has the labels; what is left at the timeout.

    Args:
        ctx: The run.
        selector: The labels.
        timeout: Seconds.
        but: What is not waited for.
    """

    def undeleted() -> list[str]:
        return named(ctx, (item for item in present(ctx, selector) if not but(item)))

    retrying = Retrying(
        retry=retry_if_result(bool),
        stop=stop_after_delay(timeout),
        wait=wait_fixed(_EVERY),
        retry_error_callback=lambda state: state.outcome.result() if state.outcome else [],
    )
    names: list[str] = retrying(undeleted)
    return names


def present(ctx: ClusterContext, selector: Mapping[str, str]) -> list[KubeObject]:
    """List what the run's namespace has with these labels; earlier attempts may be of another launch kind."""
    return [item for kind in kinds() for item in _list(ctx, kind, selector)]


def _list(ctx: ClusterContext, kind: str, selector: Mapping[str, str]) -> list[KubeObject]:
    try:
        return cluster_of(ctx).list(kind, selector)
    except (ForbiddenError, NotFoundError):
        # A cluster has the operators that it needs, and an account the rights to those.
        if _is_of_another_launch(ctx, kind):
            return []
        raise


def _is_of_another_launch(ctx: ClusterContext, kind: str) -> bool:
    own = JOB_KINDS[ctx.target.launch]
    return kind in resources() and resources()[kind] not in (own.resource, *own.companions)


def named(ctx: ClusterContext, items: Iterable[KubeObject]) -> list[str]:
    """Name objects as a report does."""
    return [f"{item['kind']} {ctx.target.namespace}/{item['metadata']['name']}" for item in items]
