"""Report what a job in a Kueue queue waits for, while it waits."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from manycpu.pipeline.adapters.cluster import Cluster
from manycpu.pipeline.adapters.cluster_watch import FAILURES, Changes, ClusterWatch
from manycpu.pipeline.spec.errors import ForbiddenError
from manycpu.pipeline.spec.job_kinds import JOB_UID_LABEL, QUEUE_LABEL, VISIBILITY, WORKLOAD
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.targets.kubernetes.following.admission import by_job, job_uid, place, waits_for
from manycpu.pipeline.targets.kubernetes.following.job_snapshot import JobSnapshot
from manycpu.pipeline.targets.kubernetes.following.shared_view import Selections, SharedView

__all__ = ["QueueWaiting", "look_once"]

_PLACES: Final = 10.0  # seconds between two requests for the positions in a queue
_SECONDS: Final = 5.0  # seconds until such a request times out
_MOST: Final = "1000"  # maximum number of positions in an answer


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
        queues = self._join()
        if not queues.is_complete:
            return ""
        workload = queues.workload_of(self._snapshot.uid)
        return _words(workload, job, queues.pending(queue, now), now)

    def close(self) -> None:
        """Stop watching."""
        if self._queues is not None:
            self._queues.leave(self._wake)
            self._queues = None

    def _join(self) -> "_Queues":
        if self._queues is None:
            self._queues = _Queues.of(self._watch, self._cluster)
            self._queues.join(self._wake, self._is_concerned)
        return self._queues

    def _is_concerned(self, change: Changes) -> bool:
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
        if now - self._asked.get(queue, 0.0) > _PLACES:
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
        return list(cluster.call("GET", path, query={"limit": _MOST}, deadline=_SECONDS)["items"])
    return []


def _queue_of(job: KubeObject | None) -> str:
    return str(job["metadata"].get("labels", {}).get(QUEUE_LABEL, "")) if job else ""
