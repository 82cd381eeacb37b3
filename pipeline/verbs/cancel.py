"""cancel: end a training, wherever it is."""

from manycpu.pipeline.verbs.context import RunContext
from manycpu.pipeline.verbs.place import on_target

__all__ = ["cancel"]


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
    return ctx.ledger.exists() and bool(on_target(ctx, "cancel").cancel(ctx, by, attempt))
