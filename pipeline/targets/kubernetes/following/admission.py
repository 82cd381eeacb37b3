"""Read off a workload what a job of a queue of Kueue's waits for. Pure."""

import re
from collections.abc import Iterable, Iterator
from typing import Final

from manycpu.pipeline.spec.job_kinds import JOB_UID_LABEL, PRIORITY_LABEL
from manycpu.pipeline.spec.kube_object import KubeObject, condition, epoch

__all__ = ["by_job", "job_uid", "place", "waits_for"]

_READY: Final = "Ready"  # of an admission check
# Kueue's words for a flavor whose quota is too small, or in use ("unused").
_LACKING: Final = re.compile(r"insufficient (unused )?quota for \S+ in flavor ([^\s,]+)")
_UNSEEN: Final = 20.0  # seconds in which Kueue has surely made a workload of a job, or let the job go on


def by_job(workloads: Iterable[KubeObject]) -> dict[str, KubeObject]:
    """Map the uid of each job to the workload that stands for it, the latest where there are several."""
    oldest_first = sorted(workloads, key=lambda found: epoch(found["metadata"]["creationTimestamp"]))
    return {job_uid(found): found for found in oldest_first}


def job_uid(workload: KubeObject) -> str:
    """Read the uid of the job that a workload stands for."""
    return str(workload["metadata"].get("labels", {}).get(JOB_UID_LABEL, ""))


def waits_for(workload: KubeObject | None, job: KubeObject, now: float) -> list[str]:
    """Describe what a suspended job waits for, a line for each reason; none where it is let go on.

    Args:
        workload: What Kueue has made of it; None: nothing yet.
        job: The job.
        now: Seconds since the epoch, by the cluster's clock.
    """
    if workload is None:
        if now - epoch(job["metadata"]["creationTimestamp"]) < _UNSEEN:
            return []
        return [_unmade(job)]
    if admitted := condition(workload, "Admitted"):
        since = epoch(admitted["lastTransitionTime"])
        return [_kept(workload)] if now - since > _UNSEEN else []
    return list(dict.fromkeys([*_evicted(workload), *_lacking(workload), *_checks(workload)]))


def place(workload: KubeObject, pending: Iterable[KubeObject]) -> str:
    """Describe a workload's place among those that wait; empty where it is not among them.

    Args:
        workload: The workload.
        pending: Those that wait in its queue, as Kueue lists them: of its namespace only, though their places
            are among all that wait for the same quota.
    """
    name = workload["metadata"]["name"]
    own = next((one for one in pending if one["metadata"]["name"] == name), None)
    if own is None:
        return ""
    local, overall = own["positionInLocalQueue"] + 1, own["positionInClusterQueue"] + 1
    among = f", and {overall} of all that wait for its quota" if overall != local else ""
    return f"it is number {local} in queue {own['localQueueName']}{among}"


def _unmade(job: KubeObject) -> str:
    """Say what keeps Kueue from making a workload: it tells nobody."""
    name = job["metadata"].get("labels", {}).get(PRIORITY_LABEL)
    priority = f"there is a WorkloadPriorityClass {name!r} (target.queue_priority), that " if name else ""
    managed = f"that its configuration has {job['kind']} among integrations.frameworks"
    return f"Kueue has made no workload of it: see that {priority}Kueue runs, and {managed}"


def _kept(workload: KubeObject) -> str:
    """Say where to look when Kueue has admitted a job that stays suspended."""
    name = workload["metadata"]["name"]
    return f"Kueue has admitted it and could not let it go on: see its events, and those of workload {name}"


def _evicted(workload: KubeObject) -> Iterator[str]:
    """Say why it was sent back after it had been admitted, or will never be."""
    if not workload["spec"].get("active", True):
        name = workload["metadata"]["name"]
        yield f"workload {name} is deactivated: it waits until somebody sets its spec.active to true"
    if evicted := condition(workload, "Evicted"):
        word = "preempted" if evicted["reason"] == "Preempted" else f"evicted ({evicted['reason']})"
        yield f"it was {word}: {_message(evicted)}"


def _lacking(workload: KubeObject) -> Iterator[str]:
    """Say what of its quota is lacking, in Kueue's words."""
    evicted = condition(workload, "Evicted")
    for found in (workload.get("status") or {}).get("conditions") or ():
        if found["type"] == "QuotaReserved" and found["status"] == "False" and found.get("message"):
            message = _message(found)
            if evicted is None or message != _message(evicted):  # at first it has that to say alone
                yield message
            if _is_in_vain(message):
                yield "its queue may never have as much: ask for less, or have its quota raised"


def _is_in_vain(message: str) -> bool:
    """Whether each flavor that is named has too small a quota of something, whoever uses it."""
    found = _LACKING.findall(message)
    return bool(found) and {flavor for _, flavor in found} == {
        flavor for unused, flavor in found if not unused
    }


def _checks(workload: KubeObject) -> Iterator[str]:
    """Name the admission checks that have not passed."""
    for check in (workload.get("status") or {}).get("admissionChecks") or ():
        if check["state"] != _READY:
            message = f": {_message(check)}" if check.get("message") else ""
            yield f"admission check {check['name']} is {check['state']}{message}"


def _message(found: KubeObject) -> str:
    return " ".join(found["message"].split())
