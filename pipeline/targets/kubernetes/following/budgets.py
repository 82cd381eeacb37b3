"""The time budgets of a run on Kubernetes: which of them runs now, and when it is used up. Pure."""

from collections.abc import Iterator
from typing import NamedTuple

from manycpu.pipeline.spec.training_run import TrainingRun
from manycpu.pipeline.targets.kubernetes.following.job_snapshot import Gang, condition, epoch, scheduled

__all__ = ["Budget", "Heard", "budgets", "phase"]

_OPERATORS = {"PyTorchJob": "training-operator", "MPIJob": "mpi-operator"}


class Heard(NamedTuple):
    """What the ranks have said so far. Times are seconds since the epoch, by the cluster's clocks."""

    met: bool = False
    """Whether the ranks have proved their scale."""
    last: float = 0.0
    """When any rank spoke last."""
    began: float = 0.0
    """When the run first had its nodes, where that is known from before."""
    since: float = 0.0
    """Since when somebody listens: before that, silence says nothing."""


class Budget(NamedTuple):
    """A budget that runs now."""

    field: str
    """The field of the run that sets it."""
    due: float
    """Seconds since the epoch at which it is used up."""
    message: str
    """What is said when it is."""


def budgets(run: TrainingRun, gang: Gang, heard: Heard) -> list[Budget]:
    """List the budgets that run now, the first to be used up first.

    Args:
        run: The run, with its timeouts in seconds.
        gang: The job, which has not ended.
        heard: What its ranks have said.
    """
    return sorted(_running(run, gang, heard), key=lambda budget: budget.due)


def _running(run: TrainingRun, gang: Gang, heard: Heard) -> Iterator[Budget]:
    now = phase(run, gang, heard)
    if now == "unacknowledged":
        yield _acknowledge(run, gang)
        return
    began = heard.began or gang.capacity(run.nodes[0])
    if began:
        message = f"not done {run.run_timeout} s after its nodes were there"
        yield Budget("run_timeout", began + run.run_timeout, message)
    if now == "queued":
        message = f"no capacity for it within {run.queue_timeout} s"
        yield Budget("queue_timeout", _queued_since(gang) + run.queue_timeout, message)
        return
    capacity = gang.capacity(run.nodes[0]) or began or 0.0
    if now == "starting":
        message = f"its ranks have not met within {run.start_timeout} s of its nodes being there"
        yield Budget("start_timeout", max(capacity, heard.since) + run.start_timeout, message)
    if run.stall_timeout is not None:
        message = f"no line from any rank for {run.stall_timeout} s"
        silent = max(capacity, heard.last, heard.since)
        yield Budget("stall_timeout", silent + run.stall_timeout, message)


def phase(run: TrainingRun, gang: Gang, heard: Heard) -> str:
    """Tell what a job that has not ended is doing: unacknowledged, queued, starting or running."""
    if not gang.acknowledged and not gang.suspended:
        return "unacknowledged"
    if gang.suspended or gang.capacity(run.nodes[0]) is None or not gang.launchable:
        return "queued"
    return "running" if heard.met else "starting"


def _acknowledge(run: TrainingRun, gang: Gang) -> Budget:
    operator = _OPERATORS.get(gang.kind, "operator")
    message = (
        f"no operator acknowledged {gang.kind} {gang.name} within {run.acknowledge_timeout} s: "
        f"is the {operator} running, and does it watch this namespace?"
    )
    return Budget("acknowledge_timeout", _created(gang) + run.acknowledge_timeout, message)


def _queued_since(gang: Gang) -> float:
    """Tell since when the job waits: since it was suspended, or its oldest pod without a node was made.

    A job that gave back what it held has waited since it was made.
    """
    if gang.note is not None:
        return _created(gang)
    if gang.suspended and (suspended := condition(gang.job, "Suspended")):
        return epoch(suspended["lastTransitionTime"])
    waiting = [pod for pod in gang.pods if scheduled(pod) is None]
    times = [epoch(pod["metadata"]["creationTimestamp"]) for pod in waiting]
    return min(times, default=_created(gang))


def _created(gang: Gang) -> float:
    return epoch(gang.job["metadata"]["creationTimestamp"]) if gang.job else 0.0
