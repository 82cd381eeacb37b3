"""cancel: end a training on any target, or prevent the launch of its next attempt."""

from manycpu.pipeline.adapters import process
from manycpu.pipeline.ledger import Lease
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

    A lease whose holder is dead, or cannot be seen from here, ends too.

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
    released = ctx.ledger.change_lease(only_if=_holder_is_not_alive, ended=True, holder=None)
    return recorded or released


def _holder_is_not_alive(lease: Lease) -> bool:
    """Whether a process holds the lease that is dead, or cannot be seen from here."""
    return lease.holder is not None and process.is_alive(lease.holder) is not True


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
        _forget(ctx, prevented)
        return "ended"
    return "nothing was running; nothing more of it will be launched"


def end_if_cancelled(ctx: RunContext, attempt: int) -> None:
    """End an attempt that was cancelled during its launch, when it could not be ended yet.

    The cancellation was recorded for the next attempt of that moment: this one, or the one after it if the
    ledger had this one already.
    """
    cancelled = ctx.ledger.read().cancelled
    by = cancelled.get(attempt) or cancelled.get(attempt + 1)
    if by is not None and cancel(ctx, by, attempt):
        _forget(ctx, attempt + 1)  # last: if this process is killed before, the next launch finds the record


def take_cancellation(ctx: RunContext) -> str | None:
    """Return how the next attempt was cancelled before its launch; None: it was not.

    The record is deleted, so that it counts only once. If the present attempt still runs, its launch was
    under way at the time of the cancellation: it is ended.
    """
    entry = ctx.ledger.read()
    by = entry.cancelled.get(entry.attempt + 1)
    if by is None:
        return None
    ended = cancel(ctx, by, entry.attempt)
    _forget(ctx, entry.attempt + 1)
    return f"ended by {by}" if ended else f"ended by {by}, before anything was launched"


def _forget(ctx: RunContext, attempt: int) -> None:
    """Delete the record that the next attempt is cancelled, unless the attempt has begun meanwhile."""
    with ctx.ledger.update() as entry:
        if entry.attempt < attempt:
            entry.cancelled.pop(attempt, None)
