"""cancel: end a training, on any target."""

from manycpu.pipeline.adapters import process
from manycpu.pipeline.spec.errors import CancelledError
from manycpu.pipeline.targets.context import RunContext

__all__ = ["cancel", "declare_gone", "heed", "withhold"]


def cancel(ctx: RunContext, by: str, attempt: int | None = None) -> bool:
    """End the present attempt, and record who did so; harmless when nothing runs.

    Args:
        ctx: The run.
        by: Who ends it, for the record.
        attempt: Only this attempt: a later one is somebody else's.

    Returns:
        Whether there was something to end.

    Raises:
        LaunchError: It does not end.
        UnseenError: Whether it runs cannot be seen from here.
        ClusterError: The cluster does not answer.
    """
    return ctx.ledger.exists() and ctx.driver.cancel(ctx, by, attempt)


def declare_gone(ctx: RunContext, by: str) -> bool:
    """Record that the processes of a run are gone for good with their host or container, as a person says.

    Args:
        ctx: The run.
        by: Who says so, for the record.

    Returns:
        Whether that was unknown until now.

    Raises:
        LaunchError: The present attempt runs on this host.
    """
    recorded = False
    with ctx.ledger.update() as entry:
        if ctx.driver.declare_gone(ctx, entry):
            entry.cancelled.setdefault(entry.attempt, by)
            recorded = True
    lease = ctx.ledger.lease()
    if lease.holder is not None and process.is_alive(lease.holder) is not True:
        ctx.ledger.change_lease(ended=True, holder=None)
        recorded = True
    return recorded


def withhold(ctx: RunContext, by: str) -> bool:
    """Cancel the next attempt of a run before it is launched, where somebody works on the run.

    Args:
        ctx: The run, of which nothing runs.
        by: Who says so, for the record.

    Returns:
        Whether somebody works on it.
    """
    held = ctx.ledger.lease().held(ctx.ledger.now())
    if held:
        with ctx.ledger.update() as entry:
            entry.cancelled[entry.attempt + 1] = by
    return held


def heed(ctx: RunContext) -> None:
    """Raise if the next attempt was cancelled before its launch; once that is said, it may be launched.

    Raises:
        CancelledError: It was.
    """
    with ctx.ledger.update() as entry:
        by = entry.cancelled.pop(entry.attempt + 1, None)
    if by is not None:
        raise CancelledError(f"ended by {by}, before anything was launched")
