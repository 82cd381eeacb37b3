"""cancel: end a training on any target, or prevent the launch of its next attempt."""

from manycpu.pipeline.adapters import process
from manycpu.pipeline.spec.errors import CancelledError
from manycpu.pipeline.targets.context import RunContext


def cancel(ctx: RunContext, by: str, attempt: int | None = None) -> bool:
    """End the present attempt and record who did so; does nothing if nothing runs.

    Args:
        ctx: The run.
        by: Who ends it, for the record.
        attempt: The attempt to end; if it is not the present one, nothing is ended. None: the present one.

    Returns:
        Whether an attempt was running.

    Raises:
        LaunchError: The training does not end.
        UnseenError: This host cannot see whether the training runs.
        ClusterError: The cluster does not answer.
    """
    return ctx.ledger.exists() and ctx.driver.cancel(ctx, by, attempt)


def declare_gone(ctx: RunContext, by: str) -> bool:
    """Record that the processes of a run ended with their host or container, as ``by`` confirms.

    Returns:
        Whether anything was recorded: False if the run had already ended.

    Raises:
        LaunchError: The present attempt runs on this host.
    """
    recorded = False
    with ctx.ledger.update() as entry:
        if ctx.driver.declare_gone(ctx, entry):
            entry.record_canceller(by)
            recorded = True
    lease = ctx.ledger.lease()
    if lease.holder is not None and process.is_alive(lease.holder) is not True:  # dead, or not to be seen
        ctx.ledger.change_lease(ended=True, holder=None)
        recorded = True
    return recorded


def cancel_next_launch(ctx: RunContext, by: str) -> bool:
    """Cancel the next attempt of a run before its launch, if a process holds the lease of the run.

    Args:
        ctx: The run; no attempt of it runs.
        by: Who cancels it, for the record.

    Returns:
        Whether a process holds the lease, so that the cancellation was recorded.
    """
    held = ctx.ledger.lease().held(ctx.ledger.now())
    if held:
        with ctx.ledger.update() as entry:
            entry.cancelled[entry.attempt + 1] = by
    return held


def refuse_cancelled_launch(ctx: RunContext) -> None:
    """Raise if the next attempt was cancelled before its launch; the cancellation counts only once.

    Raises:
        CancelledError: The next attempt was cancelled; a later try may launch it.
    """
    with ctx.ledger.update() as entry:
        by = entry.cancelled.pop(entry.attempt + 1, None)
    if by is not None:
        raise CancelledError(f"ended by {by}, before anything was launched")
