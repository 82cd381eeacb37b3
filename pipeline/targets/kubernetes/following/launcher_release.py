"""Let mpi-operator resume the launcher of an MPIJob that was suspended after its launcher had started."""

import asyncio
from contextlib import suppress
from typing import Final

from manycpu.pipeline.adapters.cluster import Cluster
from manycpu.pipeline.adapters.cluster_watch import FAILURES
from manycpu.pipeline.targets.kubernetes.following.job_snapshot import JobSnapshot

_INTERVAL_S: Final = 2.0  # between checks of a launcher that is not suspended yet


class LauncherRelease:
    """Releases the launcher of one MPIJob, so that it can be resumed; jobs of other kinds are ignored.

    mpi-operator runs the launcher as a Job. Before the operator resumes that Job, it has to clear the Job's
    ``status.startTime``. The operator's RBAC role (as of 0.8) does not allow that: the MPIJob would stay
    without a launcher. To release the launcher, manycpu clears the field with its own rights.
    """

    def __init__(self, snapshot: JobSnapshot, cluster: Cluster) -> None:
        self._snapshot, self._cluster = snapshot, cluster
        self._task: asyncio.Task[None] | None = None
        self._handled: tuple[bool, float] | None = None
        """The change that was handled last: whether it suspended the job (or resumed it), and when."""

    def release_after_change(self, *, began: bool) -> None:
        """Start to release the launcher, if the job was suspended or resumed since the last call.

        Args:
            began: Whether the job ever had nodes. If not, no launcher has started.
        """
        snapshot = self._snapshot
        was_suspended = snapshot.last_transition > 0
        if not (snapshot.job_kind.launcher and began and was_suspended):  # no launcher was ever suspended
            return
        change = (snapshot.suspended, snapshot.last_transition)
        if change != self._handled:
            self.close()  # a release for an earlier change is out of date
            self._handled = change
            self._task = asyncio.create_task(self._release())

    def close(self) -> None:
        """Cancel a release that has not finished."""
        if self._task is not None:
            self._task.cancel()

    async def _release(self) -> None:
        """Try to release the launcher until that succeeds, or no release is needed."""
        while True:
            with suppress(*FAILURES):  # try again; if no try works, a time budget ends the wait
                if await asyncio.to_thread(self._release_once):
                    return
            await asyncio.sleep(_INTERVAL_S)

    def _release_once(self) -> bool:
        """Clear the start time of the launcher's Job if that Job is suspended.

        True: nothing is left to do. False: the Job is about to be suspended, check it again.
        """
        name = f"{self._snapshot.name}-launcher"
        launcher = self._cluster.get("Job", name)
        owners = launcher["metadata"].get("ownerReferences", ()) if launcher else ()
        if launcher is None or self._snapshot.uid not in [owner["uid"] for owner in owners]:
            return True  # there is no launcher, or it belongs to another job of this name
        if not launcher["spec"].get("suspend"):
            # If the job is suspended, its operator is about to suspend the launcher too: check again.
            return not self._snapshot.suspended
        if launcher.get("status", {}).get("startTime"):
            self._cluster.patch("Job", f"{name}/status", {"status": {"startTime": None}})
        return True
