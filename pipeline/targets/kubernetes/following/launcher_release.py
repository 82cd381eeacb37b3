"""Let mpi-operator resume a launcher that had started, when its MPIJob resumes.

Before that, the operator has to clear ``status.startTime`` of the launcher Job, and its role (as of 0.8) does
not allow that: the MPIJob would stay without a launcher. So manycpu clears it, with its own rights.
"""

import asyncio
from contextlib import suppress
from typing import Final

from manycpu.pipeline.adapters.cluster import Cluster
from manycpu.pipeline.adapters.cluster_watch import FAILURES
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.targets.kubernetes.following.job_snapshot import JobSnapshot

__all__ = ["LauncherRelease"]

_AGAIN: Final = 2.0  # seconds between checks of a launcher that is not suspended yet


class LauncherRelease:
    """Releases the launcher Job of one MPIJob after each suspension.

    Args:
        snapshot: The MPIJob; jobs of other kinds are ignored.
        cluster: Its namespace.
    """

    def __init__(self, snapshot: JobSnapshot, cluster: Cluster) -> None:
        self._snapshot, self._cluster = snapshot, cluster
        self._task: asyncio.Task[None] | None = None
        self._seen: tuple[bool, float] | None = None

    def look(self, *, began: bool) -> None:
        """Start to release the launcher, once for each time that the job was suspended or resumed.

        Args:
            began: Whether the job ever had nodes: before that, no launcher has started.
        """
        snapshot = self._snapshot
        change = (snapshot.suspended, snapshot.went_on)
        if not (snapshot.job_kind.launcher and began and snapshot.went_on) or change == self._seen:
            return
        self.close()
        self._seen, self._task = change, asyncio.create_task(self._release())

    def close(self) -> None:
        """Cancel a release that has not finished."""
        if self._task is not None:
            self._task.cancel()

    async def _release(self) -> None:
        while True:
            with suppress(*FAILURES):  # retry: if no retry works, a time budget ends the wait
                if await asyncio.to_thread(self._is_released):
                    return
            await asyncio.sleep(_AGAIN)

    def _is_released(self) -> bool:
        """Clear the start time of a suspended launcher; return whether nothing is left to do."""
        name = f"{self._snapshot.name}-launcher"
        launcher = self._cluster.get("Job", name)
        if launcher is None or not _is_of(launcher, self._snapshot.uid):
            return True
        if not launcher["spec"].get("suspend"):
            return not self._snapshot.suspended  # if it is, the operator has yet to suspend the launcher
        if launcher.get("status", {}).get("startTime"):
            self._cluster.patch("Job", f"{name}/status", {"status": {"startTime": None}})
        return True


def _is_of(launcher: KubeObject, uid: str) -> bool:
    """Whether a Job has the MPIJob with this uid as its owner."""
    return any(owner["uid"] == uid for owner in launcher["metadata"].get("ownerReferences", ()))
