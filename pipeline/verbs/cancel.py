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


def cancel_or_prevent(ctx: RunContext, by: str) -> str:
    """End the present attempt of a run, or prevent the launch of the next if a process holds the lease.

    A launch that is under way ends its attempt once it can.

    Args:
        ctx: The run.
        by: Who cancels it, for the record.

    Returns:
        What was done, for people.
    """
    if cancel(ctx, by):
        return "ended"
    if not ctx.ledger.lease().held(ctx.ledger.now()):
        return "nothing was running"
    with ctx.ledger.update() as entry:
        prevented = entry.attempt + 1
        entry.cancelled[prevented] = by
    if cancel(ctx, by):  # a launch started something in between, and may have looked for the record too early
        with ctx.ledger.update() as entry:
            if entry.attempt < prevented:  # else the record is that of this attempt
                entry.cancelled.pop(prevented, None)
        return "ended"
    return "nothing was running; nothing more of it will be launched"


def cancelled_during_launch(ctx: RunContext, attempt: int) -> str | None:
    """Return who cancelled an attempt while it was launched; None: it was not cancelled.

    The attempt may have been recorded already, or not yet: then it was the next one.
    """
    if not {attempt, attempt + 1} & ctx.ledger.read().cancelled.keys():
        return None
    with ctx.ledger.update() as entry:
        later = entry.cancelled.pop(attempt + 1, None)
        return entry.cancelled.get(attempt) or later


def refuse_cancelled_launch(ctx: RunContext) -> None:
    """Raise if the next attempt was cancelled before its launch; the cancellation counts only once.

    Raises:
        CancelledError: The next attempt was cancelled; a later try may launch it.
    """
    with ctx.ledger.update() as entry:
        by = entry.cancelled.pop(entry.attempt + 1, None)
    if by is not None:
        raise CancelledError(f"ended by {by}, before anything was launched")
