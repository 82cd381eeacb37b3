"""Whether things are gone."""

from collections.abc import Callable, Iterable, Mapping

from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed

from manycpu.pipeline.adapters.cluster import Manifest
from manycpu.pipeline.verbs.context import ClusterContext

__all__ = ["named", "present", "wait_until_gone"]

# What has a run's labels. What the operators make beside it goes with the job.
KINDS = ("MPIJob", "PyTorchJob", "Pod", "PersistentVolumeClaim", "ConfigMap")
_EVERY = 0.25  # seconds between two looks


def wait_until_gone(
    ctx: ClusterContext,
    selector: Mapping[str, str],
    timeout: float,
    but: Callable[[Manifest], bool] = lambda _: False,
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


def present(ctx: ClusterContext, selector: Mapping[str, str]) -> list[Manifest]:
    """List what the run's namespace has with these labels; jobs of the run's launch kind only."""
    kinds = [kind for kind in KINDS if not kind.endswith("Job") or kind.lower() == ctx.target.launch]
    return [item for kind in kinds for item in ctx.cluster.list(kind, selector)]


def named(ctx: ClusterContext, there: Iterable[Manifest]) -> list[str]:
    """Name things as a report does."""
    return [f"{item['kind']} {ctx.target.namespace}/{item['metadata']['name']}" for item in there]
