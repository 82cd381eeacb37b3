"""What the conditions of a job say of a run's state: the same for all of Kubeflow's jobs.

A condition holds only where its ``status`` is ``"True"``: former ones stay in the list.
"""

from collections.abc import Mapping
from typing import Any

from manycpu.pipeline.launchers.given_back import note_of
from manycpu.pipeline.spec.state import RunState, Status

__all__ = ["completed", "state"]

Conditions = Mapping[str, Mapping[str, Any]]


def state(observed: Mapping[str, Any], kind: str) -> Status:
    """Read the state of a job; of one that has succeeded, its pods may have another word to say.

    Args:
        observed: ``job`` (None: there is none any more), ``pods`` and ``cancelled``.
        kind: What the job is called in messages.
    """
    job = observed["job"]
    if job is None:
        gone = f"its {kind} is gone: somebody deleted it"
        return _ended(observed, Status(state=RunState.FAILED, reason=gone))
    holds = {
        condition["type"]: condition
        for condition in (job.get("status") or {}).get("conditions") or ()
        if condition["status"] == "True"
    }
    # Both can hold: a worker that is evicted after the launcher ended well.
    if "Succeeded" in holds:
        return _ended(observed, Status(state=RunState.SUCCEEDED))
    if "Failed" in holds:
        reason = f"the {kind} has failed: {_said(holds['Failed'])}"
        return _ended(observed, Status(state=RunState.FAILED, reason=reason))
    return _underway(job, holds)


def completed(job: Mapping[str, Any]) -> str | None:
    """When a job ended, as the API writes times; None where it does not say."""
    return (job.get("status") or {}).get("completionTime")


def _ended(observed: Mapping[str, Any], otherwise: Status) -> Status:
    if observed["cancelled"]:
        return Status(state=RunState.CANCELLED, reason="cancelled")
    return otherwise


def _underway(job: Mapping[str, Any], holds: Conditions) -> Status:
    if "Suspended" in holds or (job["spec"]["runPolicy"].get("suspend") and "Running" not in holds):
        note = note_of(job)
        if note is not None and not note.resumed:
            return Status(state=RunState.PENDING, reason="it waits for room for all of its ranks")
        queue = job["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name")
        waits = f"until the queue {queue!r} admits it" if queue else "by somebody"
        return Status(state=RunState.PENDING, reason=f"suspended {waits}")
    if "Restarting" in holds:
        return Status(state=RunState.RUNNING, reason=_said(holds["Restarting"]))
    if "Running" in holds:
        return Status(state=RunState.RUNNING)
    return Status(state=RunState.PENDING, reason="" if holds else "no operator has taken notice of it")


def _said(condition: Mapping[str, Any]) -> str:
    words = (condition.get("message"), condition.get("reason"))
    return ": ".join(word.strip() for word in reversed(words) if word) or "without a reason"
