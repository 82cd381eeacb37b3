"""Report what a job in a Kueue queue waits for, from its workload.

A workload is the object in which Kueue records whether one job is admitted and, if not, why.
"""

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Final

from manycpu.pipeline.adapters.cluster import Cluster
from manycpu.pipeline.adapters.cluster_watch import FAILURES, Changes, ClusterWatch
from manycpu.pipeline.spec.errors import ForbiddenError
from manycpu.pipeline.spec.job_kinds import JOB_UID_LABEL, PRIORITY_LABEL, QUEUE_LABEL, VISIBILITY, WORKLOAD
from manycpu.pipeline.spec.kube_object import KubeObject, condition, epoch
from manycpu.pipeline.targets.kubernetes.following.job_snapshot import JobSnapshot
from manycpu.pipeline.targets.kubernetes.following.shared_view import Selections, SharedView

# Kueue's message about a flavor (a kind of node) whose quota is too small or, with "unused", is in use now.
_INSUFFICIENT: Final = re.compile(r"insufficient (unused )?quota for \S+ in flavor ([^\s,]+)")
_POSITIONS_INTERVAL_S: Final = 10.0  # between two requests for the positions in a queue
_POSITIONS_TIMEOUT_S: Final = 5.0  # for the answer to such a request
_MAX_POSITIONS: Final = "1000"  # in one answer
_ACTION_S: Final = 20.0  # Kueue creates a job's workload, and resumes an admitted job, within this time


def latest_by_job(workloads: Iterable[KubeObject]) -> dict[str, KubeObject]:
    """Map the uid of each job to its workload; if a job has several, to the latest."""
    oldest_first = sorted(workloads, key=lambda item: epoch(item["metadata"]["creationTimestamp"]))
    return {job_uid(workload): workload for workload in oldest_first}


def job_uid(workload: KubeObject) -> str:
    """Return the uid of the job that a workload stands for; empty: unknown."""
    return str(workload["metadata"].get("labels", {}).get(JOB_UID_LABEL, ""))


def describe_wait(workload: KubeObject | None, job: KubeObject, now: float) -> list[str]:
    """Return what a suspended job waits for, one line for each reason; empty: Kueue is expected to act soon.

    Args:
        workload: The job's workload; None: Kueue has not created it yet.
        job: The job.
        now: Seconds since the epoch, by the cluster's clock.
    """
    if workload is None:
        is_new = now - epoch(job["metadata"]["creationTimestamp"]) < _ACTION_S
        return [] if is_new else [_describe_missing_workload(job)]
    name = workload["metadata"]["name"]
    if admitted := condition(workload, "Admitted"):
        if now - epoch(admitted["lastTransitionTime"]) <= _ACTION_S:
            return []
        return [f"Kueue has admitted it but not resumed it: see its events, and those of workload {name}"]
    lines = []
    if not workload["spec"].get("active", True):
        lines.append(f"workload {name} is deactivated: it waits until its spec.active is set to true")
    if evicted := condition(workload, "Evicted"):
        eviction = "preempted" if evicted["reason"] == "Preempted" else f"evicted ({evicted['reason']})"
        lines.append(f"it was {eviction}: {_message_on_one_line(evicted)}")
    for check in (workload.get("status") or {}).get("admissionChecks") or ():
        if check["state"] != "Ready":
            message = f": {_message_on_one_line(check)}" if check.get("message") else ""
            lines.append(f"admission check {check['name']} is {check['state']}{message}")
    return list(dict.fromkeys([*lines, *_describe_quota(workload, evicted)]))


def _describe_missing_workload(job: KubeObject) -> str:
    """List what may be wrong if Kueue creates no workload for a job, as Kueue itself then reports nothing."""
    priority = job["metadata"].get("labels", {}).get(PRIORITY_LABEL)
    priority_hint = ""
    if priority:
        priority_hint = f"there is a WorkloadPriorityClass {priority!r} (target.queue_priority), that "
    kind_hint = f"that its configuration has {job['kind']} among integrations.frameworks"
    return f"Kueue has made no workload of it: see that {priority_hint}Kueue runs, and {kind_hint}"


def _describe_quota(workload: KubeObject, evicted: KubeObject | None) -> Iterator[str]:
    """Yield Kueue's message about a lack of quota, and a warning if even the whole quota is too small.

    Args:
        workload: The workload.
        evicted: The workload's condition Evicted, whose message is not repeated; None: it was not evicted.
    """
    for entry in (workload.get("status") or {}).get("conditions") or ():
        if entry["type"] == "QuotaReserved" and entry["status"] == "False" and entry.get("message"):
            message = _message_on_one_line(entry)
            if evicted is None or message != _message_on_one_line(evicted):  # at first, both are the same
                yield message
            # Each flavor has its own quota. Without "unused", the whole quota of the flavor is too small.
            insufficient = _INSUFFICIENT.findall(message)  # pairs: "unused " or nothing, and the flavor
            flavors = {flavor for _, flavor in insufficient}
            too_small = {flavor for unused, flavor in insufficient if not unused}
            if flavors and too_small == flavors:  # this is so in every flavor
                yield "its queue may never have as much: ask for less, or have its quota raised"


def describe_position(workload: KubeObject, pending: Iterable[KubeObject]) -> str:
    """Describe a workload's position in its queue; empty: it is not in the list.

    Args:
        workload: The workload.
        pending: The workloads of the namespace that wait in its queue, as Kueue lists them, each with two
            positions: in this queue, and among all workloads that wait for the same quota.
    """
    name = workload["metadata"]["name"]
    own = next((item for item in pending if item["metadata"]["name"] == name), None)
    if own is None:
        return ""
    # Kueue counts from 0.
    local, overall = own["positionInLocalQueue"] + 1, own["positionInClusterQueue"] + 1
    among = f", and {overall} of all that wait for its quota" if overall != local else ""
    return f"it is number {local} in queue {own['localQueueName']}{among}"


def _message_on_one_line(condition_or_check: KubeObject) -> str:
    return " ".join(condition_or_check["message"].split())


class QueueWaiting:
    """Watches the workload of one job while the job is suspended; calls ``wake`` when it may have changed."""

    def __init__(
        self, snapshot: JobSnapshot, cluster: Cluster, watch: ClusterWatch, wake: Callable[[], None]
    ) -> None:
        self._snapshot, self._cluster, self._watch, self._wake = snapshot, cluster, watch, wake

    def waiting_reason(self, now: float) -> str:
        """Return what the job waits for, one line for each reason; empty: nothing, or it is unknown."""
        job, queue = self._snapshot.job, _queue_of(self._snapshot.job)
        if job is None or not queue or not self._snapshot.suspended:
            self.close()  # the workload does not matter until the job is suspended again
            return ""
        queues = _Queues.of(self._watch, self._cluster)
        queues.join(self._wake, self._is_about_job)
        if not queues.is_complete:
            return ""
        workload = queues.workload_of(self._snapshot.uid)
        return _describe_wait_and_position(workload, job, queues.pending(queue, now), now)

    def close(self) -> None:
        """Stop watching."""
        _Queues.of(self._watch, self._cluster).leave(self._wake)

    def _is_about_job(self, change: Changes) -> bool:
        """Whether a change may concern the job's workload; true for a complete list, which may lack it."""
        return change.complete or self._snapshot.uid in map(job_uid, change.objects)


class _Queues(SharedView):
    """All workloads of a namespace, and their positions in queues, watched while a job waits."""

    def __init__(self, watch: ClusterWatch, cluster: Cluster) -> None:
        super().__init__(watch, cluster)
        self._by_job: dict[str, KubeObject] = {}
        self._read_changes = -1
        """The value of ``changes`` when ``_by_job`` was made."""
        self._pending: dict[str, list[KubeObject]] = {}
        """Queue -> the workloads that wait in it."""
        self._requested: dict[str, float] = {}
        """Queue -> when its list was last requested, in seconds since the epoch."""
        self._requests: dict[str, asyncio.Task[None]] = {}
        """Queue -> the task of its last request; kept so that it is not garbage-collected before it ends."""

    def selections(self) -> Selections:
        """Select the workloads that stand for jobs."""
        return {WORKLOAD.kind: {"labelSelector": JOB_UID_LABEL}}

    def workload_of(self, uid: str) -> KubeObject | None:
        """Return the workload of the job with this uid; None: it has none."""
        if self._read_changes != self.changes:
            self._read_changes = self.changes
            self._by_job = latest_by_job(self.objects()[WORKLOAD.kind])
        return self._by_job.get(uid)

    def pending(self, queue: str, now: float) -> list[KubeObject]:
        """Return the workloads that wait in a queue, as Kueue last listed them; empty: no answer came yet.

        If the list is older than 10 s, request it again in the background, once for all followers.
        """
        if now - self._requested.get(queue, 0.0) > _POSITIONS_INTERVAL_S:
            self._requested[queue] = now
            self._requests[queue] = asyncio.create_task(self._request(queue))
        return self._pending.get(queue, [])

    async def _request(self, queue: str) -> None:
        """Ask Kueue, on a thread, for the workloads that wait in a queue, and store the answer."""
        self._pending[queue] = await asyncio.to_thread(_list_pending, self._cluster, queue)


def describe_wait_once(cluster: Cluster, snapshot: JobSnapshot, now: float) -> str:
    """Return what a suspended job in a queue waits for now, one line for each reason, without a watch.

    Empty: the job does not wait in a queue, or the cluster does not answer.
    """
    job, queue = snapshot.job, _queue_of(snapshot.job)
    if job is None or not queue or not snapshot.suspended:
        return ""
    try:
        workloads = latest_by_job(cluster.list(WORKLOAD.kind, {JOB_UID_LABEL: snapshot.uid}))
    except ForbiddenError:
        return "what it waits for in its queue cannot be seen: this account may not list workloads"
    except FAILURES:
        return ""
    pending = _list_pending(cluster, queue)
    return _describe_wait_and_position(workloads.get(snapshot.uid), job, pending, now)


def _describe_wait_and_position(
    workload: KubeObject | None, job: KubeObject, pending: list[KubeObject], now: float
) -> str:
    """Describe what a job waits for, one line for each reason; the last line is its position in the queue."""
    lines = describe_wait(workload, job, now)
    if workload is not None and lines:  # no lines: Kueue is expected to act soon
        lines.append(describe_position(workload, pending))
    return "\n".join(filter(None, lines))


def _list_pending(cluster: Cluster, queue: str) -> list[KubeObject]:
    """List the workloads that wait in a queue; empty if the cluster does not serve or allow that."""
    with suppress(*FAILURES):
        path = cluster.path(VISIBILITY.kind, f"{queue}/pendingworkloads")
        return list(
            cluster.call("GET", path, query={"limit": _MAX_POSITIONS}, deadline=_POSITIONS_TIMEOUT_S)["items"]
        )
    return []


def _queue_of(job: KubeObject | None) -> str:
    """Return the name of a job's LocalQueue; empty: it has none."""
    return str(job["metadata"].get("labels", {}).get(QUEUE_LABEL, "")) if job else ""
