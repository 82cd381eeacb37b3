"""Describe what a job in a Kueue queue waits for, from its workload. Pure."""

import re
from collections.abc import Iterable, Iterator
from typing import Final

from manycpu.pipeline.spec.job_kinds import JOB_UID_LABEL, PRIORITY_LABEL
from manycpu.pipeline.spec.kube_object import KubeObject, condition, epoch

__all__ = ["by_job", "job_uid", "place", "waits_for"]

_READY: Final = "Ready"  # the state of an admission check that has passed
# Kueue's words for a flavor whose quota is too small, or, with "unused", used by other jobs.
_LACKING: Final = re.compile(r"insufficient (unused )?quota for \S+ in flavor ([^\s,]+)")
_UNSEEN: Final = 20.0  # seconds within which Kueue creates a job's workload, and resumes an admitted job


def by_job(workloads: Iterable[KubeObject]) -> dict[str, KubeObject]:
    """Map the uid of each job to its workload, the latest if it has several."""
    oldest_first = sorted(workloads, key=lambda found: epoch(found["metadata"]["creationTimestamp"]))
    return {job_uid(found): found for found in oldest_first}


def job_uid(workload: KubeObject) -> str:
    """Return the uid of the job that a workload stands for; empty: unknown."""
    return str(workload["metadata"].get("labels", {}).get(JOB_UID_LABEL, ""))


def waits_for(workload: KubeObject | None, job: KubeObject, now: float) -> list[str]:
    """Describe what a suspended job waits for, one line for each reason; empty: Kueue acts soon.

    Args:
        workload: The workload that Kueue has created for it; None: none yet.
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
    """Describe a workload's position in its queue; empty: it is not in the list.

    Args:
        workload: The workload.
        pending: The workloads that wait in its queue, as Kueue lists them. Kueue lists only those of the
            namespace, but counts their positions among all that wait for the same quota, too.
    """
    name = workload["metadata"]["name"]
    own = next((one for one in pending if one["metadata"]["name"] == name), None)
    if own is None:
        return ""
    local, overall = own["positionInLocalQueue"] + 1, own["positionInClusterQueue"] + 1
    among = f", and {overall} of all that wait for its quota" if overall != local else ""
    return f"it is number {local} in queue {own['localQueueName']}{among}"


def _unmade(job: KubeObject) -> str:
    """Describe what may keep Kueue from creating a workload: Kueue itself reports nothing."""
    name = job["metadata"].get("labels", {}).get(PRIORITY_LABEL)
    priority = f"there is a WorkloadPriorityClass {name!r} (target.queue_priority), that " if name else ""
    managed = f"that its configuration has {job['kind']} among integrations.frameworks"
    return f"Kueue has made no workload of it: see that {priority}Kueue runs, and {managed}"


def _kept(workload: KubeObject) -> str:
    """Describe where to look if Kueue has admitted a job, but the job stays suspended."""
    name = workload["metadata"]["name"]
    return f"Kueue has admitted it and could not let it go on: see its events, and those of workload {name}"


def _evicted(workload: KubeObject) -> Iterator[str]:
    """Describe why a workload was evicted, or that it is deactivated."""
    if not workload["spec"].get("active", True):
        name = workload["metadata"]["name"]
        yield f"workload {name} is deactivated: it waits until somebody sets its spec.active to true"
    if evicted := condition(workload, "Evicted"):
        word = "preempted" if evicted["reason"] == "Preempted" else f"evicted ({evicted['reason']})"
        yield f"it was {word}: {_message(evicted)}"


def _lacking(workload: KubeObject) -> Iterator[str]:
    """Describe which quota is too small, in Kueue's words."""
    evicted = condition(workload, "Evicted")
    for found in (workload.get("status") or {}).get("conditions") or ():
        if found["type"] == "QuotaReserved" and found["status"] == "False" and found.get("message"):
            message = _message(found)
            if evicted is None or message != _message(evicted):  # Kueue first repeats that message here
                yield message
            if _is_in_vain(message):
                yield "its queue may never have as much: ask for less, or have its quota raised"


def _is_in_vain(message: str) -> bool:
    """Whether every flavor that Kueue names has too small a quota, even if no job uses it."""
    found = _LACKING.findall(message)
    return bool(found) and {flavor for _, flavor in found} == {
        flavor for unused, flavor in found if not unused
    }


def _checks(workload: KubeObject) -> Iterator[str]:
    """Describe the admission checks that have not passed."""
    for check in (workload.get("status") or {}).get("admissionChecks") or ():
        if check["state"] != _READY:
            message = f": {_message(check)}" if check.get("message") else ""
            yield f"admission check {check['name']} is {check['state']}{message}"


def _message(found: KubeObject) -> str:
    return " ".join(found["message"].split())
