"""Let mpi-operator resume a launcher that had begun, when its MPIJob goes on.

It has to take the launcher Job's ``status.startTime`` away before, and its own role (as of 0.8) does not let
it: the MPIJob would go on without a launcher, for ever. Ours may.
"""

import asyncio
from contextlib import suppress
from typing import Final

from manycpu.pipeline.adapters.cluster import Cluster
from manycpu.pipeline.adapters.cluster_watch import FAILURES
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.targets.kubernetes.following.job_snapshot import JobSnapshot

__all__ = ["LauncherRelease"]

_AGAIN: Final = 2.0  # seconds between looks at a launcher that is still to be suspended


class LauncherRelease:
    """Looks after the launcher Job of one MPIJob that was suspended.

    Args:
        snapshot: The MPIJob; for other kinds nothing is done.
        cluster: Its namespace.
    """

    def __init__(self, snapshot: JobSnapshot, cluster: Cluster) -> None:
        self._snapshot, self._cluster = snapshot, cluster
        self._task: asyncio.Task[None] | None = None
        self._seen: tuple[bool, float] | None = None

    def look(self, *, began: bool) -> None:
        """Begin to release the launcher where the job was suspended, once for each time that it was.

        Args:
            began: Whether the job ever had nodes, so that it may have a launcher.
        """
        snapshot = self._snapshot
        change = (snapshot.suspended, snapshot.went_on)
        if not (snapshot.job_kind.launcher and began and snapshot.went_on) or change == self._seen:
            return
        self.close()
        self._seen, self._task = change, asyncio.create_task(self._release())

    def close(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()

    async def _release(self) -> None:
        while True:
            with suppress(*FAILURES):  # that nothing begins, its budgets tell
                if await asyncio.to_thread(self._is_released):
                    return
            await asyncio.sleep(_AGAIN)

    def _is_released(self) -> bool:
        """Take the start of a suspended launcher away; whether there is nothing more to do."""
        name = f"{self._snapshot.name}-launcher"
        launcher = self._cluster.get("Job", name)
        if launcher is None or not _is_of(launcher, self._snapshot.uid):
            return True
        if not launcher["spec"].get("suspend"):
            return not self._snapshot.suspended  # or its operator is about to suspend it
        if launcher.get("status", {}).get("startTime"):
            self._cluster.patch("Job", f"{name}/status", {"status": {"startTime": None}})
        return True


def _is_of(launcher: KubeObject, uid: str) -> bool:
    """Whether a Job is the MPIJob's own, and not one of somebody else's that has its name."""
    return any(owner["uid"] == uid for owner in launcher["metadata"].get("ownerReferences", ()))
