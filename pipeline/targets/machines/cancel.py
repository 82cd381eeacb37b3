"""Cancel the supervised process of a training."""

from manycpu.pipeline.adapters import process
from manycpu.pipeline.adapters.commands import END_TIMEOUT
from manycpu.pipeline.targets.context import MachineContext
from manycpu.pipeline.targets.machines.launch import present_handle

__all__ = ["cancel"]


def cancel(ctx: MachineContext, by: str, attempt: int | None) -> bool:
    """End the present attempt, and record who did so.

    Args:
        ctx: The run.
        by: Who ends it, for the record.
        attempt: Only this attempt: a later one is somebody else's.

    Returns:
        Whether there was something to end.

    Raises:
        LaunchError: It does not end.
        UnseenError: Whether it runs cannot be seen from here.
    """
    with ctx.ledger.update() as entry:
        handle = present_handle(ctx, entry)
        if handle is None or (attempt is not None and entry.attempt != attempt):
            return False
        observed = process.observe(handle)
        if observed["exit"] is not None:
            process.wait_until_gone(handle, END_TIMEOUT)
            return False
        if observed["alive"] is None:
            raise process.unseen_error(handle, observed["unseen"])
        entry.cancelled.setdefault(entry.attempt, by)
    process.cancel(handle)
    return True
