"""Cancel a training: delete its job."""

from manycpu.pipeline.spec.errors import LaunchError
from manycpu.pipeline.spec.job_kinds import JOB_KINDS
from manycpu.pipeline.spec.naming import labels
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, cluster_of
from manycpu.pipeline.targets.kubernetes.deletion import is_companion, wait_until_gone
from manycpu.pipeline.targets.kubernetes.following.attempt_recorder import attempt_state
from manycpu.pipeline.targets.kubernetes.launch import has_ended, present_handle

__all__ = ["cancel"]

_TIMEOUT = 90.0  # seconds; the grace period of pods is 30 s


def cancel(ctx: ClusterContext, by: str, attempt: int | None) -> bool:
    """Record who cancels the present attempt, delete its job, and wait until its pods are gone.

    Args:
        ctx: The run.
        by: Who cancels it.
        attempt: The attempt to cancel; None: the present one.

    Returns:
        False: this attempt has ended, or is not the present one.

    Raises:
        LaunchError: The pods do not end in time.
        ClusterError: The cluster does not answer.
    """
    with ctx.ledger.update() as entry:
        if attempt is not None and entry.attempt != attempt:
            return False
        handle = present_handle(ctx, entry)
        if handle is None or attempt_state(entry, handle).succeeded or has_ended(ctx, handle):
            return False
        entry.cancelled.setdefault(entry.attempt, by)
    cluster_of(ctx).delete(JOB_KINDS[handle.launch].kind, handle.name, uid=handle.uid)
    attempt_labels = labels(ctx.name, attempt=str(handle.attempt))
    undeleted = wait_until_gone(ctx, attempt_labels, _TIMEOUT, but=is_companion)
    if undeleted:
        raise LaunchError(
            f"{', '.join(undeleted)} is still there {_TIMEOUT:g} s after the run was cancelled",
            fix="See why it stays with `kubectl describe`; its node may be lost",
        )
    return True
