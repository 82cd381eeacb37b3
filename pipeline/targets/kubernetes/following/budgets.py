"""Compute which time budgets of a run on Kubernetes count at present, and when each is used up. Pure."""

from collections.abc import Iterator
from typing import NamedTuple

from manycpu.pipeline.spec.kube_object import epoch
from manycpu.pipeline.spec.training_run import TrainingRun
from manycpu.pipeline.targets.kubernetes.following.job_snapshot import (
    JobSnapshot,
)
from manycpu.pipeline.targets.kubernetes.pod_status import scheduled

__all__ = ["Budget", "RankActivity", "budgets", "phase"]


class RankActivity(NamedTuple):
    """What the ranks have done so far. Times are seconds since the epoch, by the cluster's clocks."""

    met: bool = False
    """Whether the ranks have proved their scale."""
    last: float = 0.0
    """When any rank last wrote a line; 0: none has."""
    began: float = 0.0
    """When the run got its nodes, plus the time that it spent without them since; 0: not recorded yet."""
    since: float = 0.0
    """Since when the follower watches the pods without a break: earlier silence proves nothing."""
    paused: float = 0.0
    """Since when the job is suspended, so that only ``queue_timeout`` counts; 0: it is not suspended."""
    stood: float = 0.0
    """When the follower last saw the job with its nodes, or suspended; 0: it never did."""
    finished: float = 0.0
    """When a rank last wrote a line, if all ranks of the last meeting have ended with 0; 0: they have not."""


class Budget(NamedTuple):
    """A time budget that counts at present."""

    field: str
    """The field of the run that sets the budget."""
    due: float
    """When the budget is used up, in seconds since the epoch."""
    message: str
    """Why the run fails then."""


def budgets(run: TrainingRun, snapshot: JobSnapshot, activity: RankActivity) -> list[Budget]:
    """List the time budgets that count at present, the earliest due first.

    Args:
        run: The run, with its timeouts in seconds.
        snapshot: The job, which has not ended.
        activity: What its ranks have done so far.
    """
    return sorted(_running(run, snapshot, activity), key=lambda budget: budget.due)


def _running(run: TrainingRun, snapshot: JobSnapshot, activity: RankActivity) -> Iterator[Budget]:
    now = phase(run, snapshot, activity)
    if now == "unacknowledged":
        yield _acknowledge(run, snapshot, activity)
        return
    began = activity.began or snapshot.capacity(run.nodes[0])
    if began and not activity.paused:
        message = f"not done {run.run_timeout} s after its nodes were there"
        yield Budget("run_timeout", began + run.run_timeout, message)
    if now == "queued":
        message = f"no capacity for it within {run.queue_timeout} s"
        yield Budget("queue_timeout", _queued_since(snapshot, activity) + run.queue_timeout, message)
        return
    capacity = snapshot.capacity(run.nodes[0]) or began or 0.0
    if now == "starting":
        message = f"its ranks have not met within {run.start_timeout} s of its nodes being there"
        yield Budget("start_timeout", max(capacity, activity.since) + run.start_timeout, message)
    if run.stall_timeout is not None:
        message = f"no line from any rank for {run.stall_timeout} s"
        silent = max(capacity, activity.last, activity.since)
        yield Budget("stall_timeout", silent + run.stall_timeout, message)


def phase(run: TrainingRun, snapshot: JobSnapshot, activity: RankActivity) -> str:
    """Return the phase of a job that has not ended: unacknowledged, queued, starting or running."""
    if not snapshot.acknowledged and not snapshot.suspended:
        return "unacknowledged"
    if snapshot.suspended or snapshot.capacity(run.nodes[0]) is None or not snapshot.launchable:
        return "queued"
    return "running" if activity.met else "starting"


def _acknowledge(run: TrainingRun, snapshot: JobSnapshot, activity: RankActivity) -> Budget:
    message = (
        f"no operator acknowledged {snapshot.kind} {snapshot.name} within {run.acknowledge_timeout} s: "
        f"is the {snapshot.job_kind.operator} running, and does it watch this namespace?"
    )
    return Budget(
        "acknowledge_timeout", max(_created(snapshot), activity.stood) + run.acknowledge_timeout, message
    )


def _queued_since(snapshot: JobSnapshot, activity: RankActivity) -> float:
    """Return since when a job waits: since its suspension, or the creation of its oldest pod without a node.

    A job that has ever given back its pods waits since its own creation.
    """
    if snapshot.note is not None:
        return _created(snapshot)
    if snapshot.suspended:
        return activity.paused or snapshot.suspended_since or _created(snapshot)
    waiting = [pod for pod in snapshot.pods if scheduled(pod) is None]
    times = [epoch(pod["metadata"]["creationTimestamp"]) for pod in waiting]
    return min(times, default=_without_pods_since(snapshot, activity))


def _without_pods_since(snapshot: JobSnapshot, activity: RankActivity) -> float:
    """Return since when a job lacks pods: since it was created, was resumed, or last had its nodes."""
    went_on = max(_created(snapshot), snapshot.went_on, activity.paused)
    return max(went_on, activity.stood or activity.since) if activity.began else went_on


def _created(snapshot: JobSnapshot) -> float:
    return epoch(snapshot.job["metadata"]["creationTimestamp"]) if snapshot.job else 0.0
