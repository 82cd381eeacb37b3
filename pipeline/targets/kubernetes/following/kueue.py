"""Report what a job in a Kueue queue waits for, from the workload that Kueue has made of it."""

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

# Kueue's words for a flavor whose quota is too small, or, with "unused", used by other jobs.
_LACKING: Final = re.compile(r"insufficient (unused )?quota for \S+ in flavor ([^\s,]+)")
_PLACES_INTERVAL_S: Final = 10.0  # between two requests for the positions in a queue
_PLACES_TIMEOUT_S: Final = 5.0
_MAX_PLACES: Final = "1000"  # in an answer
_ACTION_S: Final = 20.0  # seconds within which Kueue creates a job's workload, and resumes an admitted job


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
        if now - epoch(job["metadata"]["creationTimestamp"]) < _ACTION_S:
            return []
        # Kueue itself reports nothing then.
        priority = job["metadata"].get("labels", {}).get(PRIORITY_LABEL)
        exists = (
            f"there is a WorkloadPriorityClass {priority!r} (target.queue_priority), that "
            if priority
            else ""
        )
        managed = f"that its configuration has {job['kind']} among integrations.frameworks"
        return [f"Kueue has made no workload of it: see that {exists}Kueue runs, and {managed}"]
    name = workload["metadata"]["name"]
    if admitted := condition(workload, "Admitted"):
        kept = f"Kueue has admitted it but not resumed it: see its events, and those of workload {name}"
        return [kept] if now - epoch(admitted["lastTransitionTime"]) > _ACTION_S else []
    lines = []
    if not workload["spec"].get("active", True):
        lines.append(f"workload {name} is deactivated: it waits until its spec.active is set to true")
    if evicted := condition(workload, "Evicted"):
        word = "preempted" if evicted["reason"] == "Preempted" else f"evicted ({evicted['reason']})"
        lines.append(f"it was {word}: {_message(evicted)}")
    for check in (workload.get("status") or {}).get("admissionChecks") or ():
        if check["state"] != "Ready":
            message = f": {_message(check)}" if check.get("message") else ""
            lines.append(f"admission check {check['name']} is {check['state']}{message}")
    return list(dict.fromkeys([*lines, *_lacking(workload, evicted)]))


def _lacking(workload: KubeObject, evicted: KubeObject | None) -> Iterator[str]:
    """Describe which quota is too small, in Kueue's words."""
    for found in (workload.get("status") or {}).get("conditions") or ():
        if found["type"] == "QuotaReserved" and found["status"] == "False" and found.get("message"):
            message = _message(found)
            if evicted is None or message != _message(evicted):  # Kueue first repeats that message here
                yield message
            flavors = _LACKING.findall(message)
            used_or_not = {flavor for unused, flavor in flavors if not unused}
            if flavors and used_or_not == {flavor for _, flavor in flavors}:
                yield "its queue may never have as much: ask for less, or have its quota raised"


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


def _message(found: KubeObject) -> str:
    return " ".join(found["message"].split())


class QueueWaiting:
    """Follows the workload of one job while the job is suspended.

    Args:
        snapshot: The job.
        cluster: Its namespace.
        watch: The same namespace; the followers of one watch share a view of its queues.
        wake: Called when the job's workload has changed.
    """

    def __init__(
        self, snapshot: JobSnapshot, cluster: Cluster, watch: ClusterWatch, wake: Callable[[], None]
    ) -> None:
        self._snapshot, self._cluster, self._watch, self._wake = snapshot, cluster, watch, wake
        self._queues: _Queues | None = None

    def look(self, now: float) -> str:
        """Return what the job waits for, one line for each reason; empty: nothing, or it is unknown.

        Args:
            now: Seconds since the epoch, by the cluster's clock.
        """
        job, queue = self._snapshot.job, _queue_of(self._snapshot.job)
        if job is None or not queue or not self._snapshot.suspended:
            self.close()
            return ""
        if self._queues is None:
            self._queues = _Queues.of(self._watch, self._cluster)
            self._queues.join(self._wake, self._concerns)
        if not self._queues.is_complete:
            return ""
        workload = self._queues.workload_of(self._snapshot.uid)
        return _words(workload, job, self._queues.pending(queue, now), now)

    def close(self) -> None:
        """Stop watching."""
        if self._queues is not None:
            self._queues.leave(self._wake)
            self._queues = None

    def _concerns(self, change: Changes) -> bool:
        return change.complete or self._snapshot.uid in map(job_uid, change.objects)


class _Queues(SharedView):
    """All workloads of a namespace and their positions, watched while a job waits."""

    def __init__(self, watch: ClusterWatch, cluster: Cluster) -> None:
        super().__init__(watch, cluster)
        self._by_job: dict[str, KubeObject] = {}
        self._read_at = -1
        self._pending: dict[str, list[KubeObject]] = {}
        self._asked: dict[str, float] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}

    def selections(self) -> Selections:
        """Select the workloads that stand for jobs."""
        return {WORKLOAD.kind: {"labelSelector": JOB_UID_LABEL}}

    def workload_of(self, uid: str) -> KubeObject | None:
        """Return the workload of the job with this uid; None: it has none."""
        if self._read_at != self.changes:
            self._read_at, self._by_job = self.changes, by_job(self.objects()[WORKLOAD.kind])
        return self._by_job.get(uid)

    def pending(self, queue: str, now: float) -> list[KubeObject]:
        """Return the workloads that wait in a queue, as of the last request; all followers share requests."""
        if now - self._asked.get(queue, 0.0) > _PLACES_INTERVAL_S:
            self._asked[queue] = now
            self._asking[queue] = asyncio.create_task(self._ask(queue))
        return self._pending.get(queue, [])

    async def _ask(self, queue: str) -> None:
        self._pending[queue] = await asyncio.to_thread(_pending, self._cluster, queue)


def look_once(cluster: Cluster, snapshot: JobSnapshot, now: float) -> str:
    """Return what a job waits for at present, as :class:`QueueWaiting` does, but without a watch.

    Args:
        cluster: Its namespace.
        snapshot: The job.
        now: Seconds since the epoch.
    """
    job, queue = snapshot.job, _queue_of(snapshot.job)
    if job is None or not queue or not snapshot.suspended:
        return ""
    try:
        found = by_job(cluster.list(WORKLOAD.kind, {JOB_UID_LABEL: snapshot.uid})).get(snapshot.uid)
    except ForbiddenError:
        return "what it waits for in its queue cannot be seen: this account may not list workloads"
    except FAILURES:
        return ""
    return _words(found, job, _pending(cluster, queue), now)


def _words(workload: KubeObject | None, job: KubeObject, pending: list[KubeObject], now: float) -> str:
    lines = waits_for(workload, job, now)
    if workload is not None and lines:
        lines.append(place(workload, pending))
    return "\n".join(filter(None, lines))


def _pending(cluster: Cluster, queue: str) -> list[KubeObject]:
    """List the workloads that wait in a queue; empty if the cluster does not serve or allow that."""
    with suppress(*FAILURES):
        path = cluster.path(VISIBILITY.kind, f"{queue}/pendingworkloads")
        return list(
            cluster.call("GET", path, query={"limit": _MAX_PLACES}, deadline=_PLACES_TIMEOUT_S)["items"]
        )
    return []


def _queue_of(job: KubeObject | None) -> str:
    return str(job["metadata"].get("labels", {}).get(QUEUE_LABEL, "")) if job else ""
