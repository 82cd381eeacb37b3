"""Whether things are gone."""

from collections.abc import Callable, Iterable, Mapping

from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed

from manycpu.pipeline.spec.errors import ForbiddenError, NotFoundError
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.targets.context import ClusterContext
from manycpu.pipeline.targets.kubernetes.following.job_snapshot import JOBS

__all__ = ["named", "present", "wait_until_gone"]

# What has a run's labels. What the operators make beside it goes with the job.
KINDS = ("MPIJob", "PyTorchJob", "Pod", "PersistentVolumeClaim", "ConfigMap")
_EVERY = 0.25  # seconds between two looks


def wait_until_gone(
    ctx: ClusterContext,
    selector: Mapping[str, str],
    timeout: float,
    but: Callable[[KubeObject], bool] = lambda _: False,
) -> list[str]:
    """Wait until nothing in the run's namespace has the labels; what is left after so many seconds.

    Args:
        ctx: The run.
        selector: The labels.
        timeout: Seconds.
        but: What is not waited for.
    """

    def left() -> list[str]:
        return named(ctx, (item for item in present(ctx, selector) if not but(item)))

    retrying = Retrying(
        retry=retry_if_result(bool),
        stop=stop_after_delay(timeout),
        wait=wait_fixed(_EVERY),
        retry_error_callback=lambda state: state.outcome.result() if state.outcome else [],
    )
    found: list[str] = retrying(left)
    return found


def present(ctx: ClusterContext, selector: Mapping[str, str]) -> list[KubeObject]:
    """List what the run's namespace has with these labels; earlier attempts may be of another launch kind."""
    return [item for kind in KINDS for item in _list(ctx, kind, selector)]


def _list(ctx: ClusterContext, kind: str, selector: Mapping[str, str]) -> list[KubeObject]:
    try:
        return ctx.cluster.list(kind, selector)
    except (ForbiddenError, NotFoundError):
        # A cluster has the operators that it needs, and an account the rights to those.
        if kind in JOBS.values() and kind != JOBS[ctx.target.launch]:
            return []
        raise


def named(ctx: ClusterContext, there: Iterable[KubeObject]) -> list[str]:
    """Name things as a report does."""
    return [f"{item['kind']} {ctx.target.namespace}/{item['metadata']['name']}" for item in there]
