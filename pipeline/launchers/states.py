"""Derive a run's state: from a job's conditions on Kubernetes, or from a supervised process on machines."""

from collections.abc import Mapping
from typing import Any, Final

from manycpu.pipeline.spec.job_kinds import FAILED, JobKind
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.spec.state import RunState, Status, describe_exit


def job_state(kind: JobKind, job: KubeObject | None) -> Status:
    """Derive a run's state from the conditions of its Kubernetes job; ``job`` None: the job was deleted.

    A job that none of the known conditions holds for is pending.
    """
    if job is None:
        return Status(state=RunState.FAILED, reason=f"its {kind.kind} is gone: somebody deleted it")
    holds = {condition["type"]: condition for condition in kind.conditions(job)}  # only true conditions
    # Success first: both can hold, if a worker is evicted after the launcher ended well.
    if kind.succeeded in holds:
        return Status(state=RunState.SUCCEEDED)
    if FAILED in holds:
        return Status(state=RunState.FAILED, reason=f"the {kind.kind} has failed: {_message(holds[FAILED])}")
    if "Restarting" in holds:
        return Status(state=RunState.RUNNING, reason=_message(holds["Restarting"]))
    return Status(state=RunState.RUNNING if "Running" in holds else RunState.PENDING)


def container_state(pod: Mapping[str, Any], name: str, when: str, state: str) -> Mapping[str, Any] | None:
    """Read the state of a container of a pod.

    Args:
        pod: The pod.
        name: The container.
        when: ``state`` for the present state, or ``lastState`` for that before its last restart.
        state: ``waiting``, ``running`` or ``terminated``.

    Returns:
        Details of the state; None: the container is, or was, in another state.
    """
    for status in (pod.get("status") or {}).get("containerStatuses") or ():
        if status["name"] == name:
            details: Mapping[str, Any] | None = (status.get(when) or {}).get(state)
            return details
    return None


def _message(condition: Mapping[str, Any]) -> str:
    """Join the reason and the message of a job's condition; either may be missing."""
    texts = [condition.get("reason"), condition.get("message")]
    return ": ".join(text.strip() for text in texts if text) or "without a reason"


_STOPPED: Final = ("SIGTERM", "SIGHUP")
"""Reasons in the exit record of a supervisor that something else than manycpu has ended."""


def process_state(observed: Mapping[str, Any]) -> Status:
    """Derive a run's state from what was observed of its supervisor process.

    Args:
        observed: ``alive`` (whether the supervisor lives; None: unknown), ``unseen`` (why that is unknown),
            ``met`` (whether all ranks have met), ``exit`` (its exit record, or None) and ``cancelled``
            (whether the ledger records a cancellation).
    """
    record = observed["exit"]
    if record is None:
        if observed["alive"] is None:
            return Status(state=RunState.UNKNOWN, reason=observed["unseen"])
        if not observed["alive"]:
            gone = "its supervisor is gone without an exit record: killed, or the machine restarted"
            return Status(state=RunState.FAILED, reason=gone)
        state = RunState.RUNNING if observed["met"] else RunState.PENDING
        return Status(state=state, reason="" if observed["met"] else "starting")
    if observed["cancelled"] or record["reason"] == "cancelled":
        return Status(state=RunState.CANCELLED, reason=record["reason"])
    reason = record["reason"]
    is_stopped = reason in _STOPPED
    if is_stopped:
        reason = f"its supervisor got {reason} without a cancellation: its service or machine was stopped"
    if not reason and record["code"] != 0:
        reason = f"the launcher ended with {describe_exit(record['code'])}"
    if reason:  # a budget was used up, the launcher could not be run, or it ended with an error
        return Status(state=RunState.FAILED, reason=reason, by_itself=not is_stopped)
    return Status(state=RunState.SUCCEEDED)
