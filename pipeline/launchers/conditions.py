"""Derive a run's state from a job's conditions: the same for all kinds of job.

A condition holds only where its ``status`` is ``"True"``: former ones stay in the list.
"""

from collections.abc import Mapping
from typing import Any

from manycpu.pipeline.spec.job_kinds import FAILED, JobKind
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.spec.state import RunState, Status

__all__ = ["completed", "state"]


def state(kind: JobKind, job: KubeObject | None) -> Status:
    """Derive a job's state from its conditions; of one that has succeeded, its pods may differ.

    Args:
        kind: Its kind.
        job: As the API shows it; None: there is none any more.
    """
    if job is None:
        return Status(state=RunState.FAILED, reason=f"its {kind.kind} is gone: somebody deleted it")
    holds = {
        condition["type"]: condition
        for condition in (job.get("status") or {}).get("conditions") or ()
        if condition["status"] == "True"
    }
    # Both can hold: a worker that is evicted after the launcher ended well.
    if kind.succeeded in holds:
        return Status(state=RunState.SUCCEEDED)
    if FAILED in holds:
        return Status(state=RunState.FAILED, reason=f"the {kind.kind} has failed: {_message(holds[FAILED])}")
    if "Restarting" in holds:
        return Status(state=RunState.RUNNING, reason=_message(holds["Restarting"]))
    return Status(state=RunState.RUNNING if "Running" in holds else RunState.PENDING)


def completed(job: KubeObject) -> str | None:
    """Read when a job ended, as the API writes times; None where it does not say."""
    return (job.get("status") or {}).get("completionTime")


def _message(condition: Mapping[str, Any]) -> str:
    words = (condition.get("message"), condition.get("reason"))
    return ": ".join(word.strip() for word in reversed(words) if word) or "without a reason"
