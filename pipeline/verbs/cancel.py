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
    """Record that the processes of a run ended with their host or container, as a person confirms.

    If the holder of the lease is dead, or cannot be seen from here, the lease ends too.

    Args:
        ctx: The run.
        by: The person, for the record.

    Returns:
        Whether anything was recorded. False: there is no attempt or its end was known, and no lease had to
        end.

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
    """Whether the lease has a holder, and that process is dead or cannot be seen from here."""
    return lease.holder is not None and process.is_alive(lease.holder) is not True


def cancel_or_prevent(ctx: RunContext, by: str) -> str:
    """End the present attempt of a run; if none runs, prevent the launch of the next one.

    The next launch is prevented only if a process works on the run: if its lease is held. A launch that is
    under way meanwhile ends its own attempt.

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

    The cancellation was recorded for the attempt that was the next one at that time. This is ``attempt``; or
    the attempt after it, if the ledger had ``attempt`` already.
    """
    cancelled = ctx.ledger.read().cancelled
    by = cancelled.get(attempt) or cancelled.get(attempt + 1)
    if by is not None and cancel(ctx, by, attempt):
        _forget(ctx, attempt + 1)  # last: if this process is killed before, the next launch finds the record


def take_cancellation(ctx: RunContext) -> str | None:
    """Return a text that says who cancelled the next attempt before its launch; None: it is not cancelled.

    The record is deleted, so that it counts only once. If the present attempt still runs, it is ended: its
    launch was under way at the time of the cancellation.
    """
    entry = ctx.ledger.read()
    by = entry.cancelled.get(entry.attempt + 1)
    if by is None:
        return None
    ended = cancel(ctx, by, entry.attempt)
    _forget(ctx, entry.attempt + 1)
    return f"ended by {by}" if ended else f"ended by {by}, before anything was launched"


def _forget(ctx: RunContext, attempt: int) -> None:
    """Delete the record that ``attempt``, the next one, is cancelled; do nothing if it has begun."""
    with ctx.ledger.update() as entry:
        if entry.attempt < attempt:
            entry.cancelled.pop(attempt, None)
