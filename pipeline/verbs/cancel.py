"""cancel: end a training, on any target."""

import time

from manycpu.pipeline.spec.errors import CancelledError
from manycpu.pipeline.targets import verbs_of
from manycpu.pipeline.targets.context import RunContext

__all__ = ["cancel", "heed", "withhold"]


def cancel(ctx: RunContext, by: str, attempt: int | None = None) -> bool:
    """End the present attempt, and record who did so; harmless when nothing runs.

    Args:
        ctx: The run.
        by: Who ends it, for the record.
        attempt: Only this attempt: a later one is somebody else's.

    Returns:
        Whether there was something to end.

    Raises:
        LaunchError: It does not end, or was started on another machine.
        ClusterError: The cluster does not answer.
    """
    return ctx.ledger.exists() and verbs_of(ctx).cancel(ctx, by, attempt)


def withhold(ctx: RunContext, by: str) -> bool:
    """Cancel the next attempt of a run before it is launched, where somebody works on the run.

    Args:
        ctx: The run, of which nothing runs.
        by: Who says so, for the record.

    Returns:
        Whether somebody works on it.
    """
    held = ctx.ledger.lease().held(time.time())
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
