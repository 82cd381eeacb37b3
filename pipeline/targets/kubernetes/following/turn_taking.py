"""Give back a job's pods while its ranks cannot all be placed, and resume the job when it is its turn."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, NamedTuple

from manycpu.pipeline.adapters.cluster import Cluster
from manycpu.pipeline.adapters.cluster_watch import FAILURES, ClusterWatch
from manycpu.pipeline.spec.errors import ConflictError, ForbiddenError, NotFoundError, UnauthorizedError
from manycpu.pipeline.spec.job_kinds import JOB_KINDS, JobKind
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.spec.naming import attempt_key, label
from manycpu.pipeline.targets.kubernetes.following.job_snapshot import JobSnapshot, role
from manycpu.pipeline.targets.kubernetes.following.shared_view import RETRY_INTERVAL_S, Selections, SharedView
from manycpu.pipeline.targets.kubernetes.following.turns import (
    Job,
    Note,
    Turns,
    claim_mounted_elsewhere,
    job_of,
    patch,
    waits_for,
)
from manycpu.pipeline.targets.kubernetes.pod_status import claims_of, ended, scheduled

_log = logging.getLogger(__name__)
_SELECTION: Final = {"labelSelector": "app.kubernetes.io/managed-by=manycpu"}
_LAUNCHER_INTERVAL_S: Final = 2.0  # between checks of a launcher that is not suspended yet


class TurnTaking:
    """Suspends one job while there is no room for it, and resumes it in its turn.

    Args:
        snapshot: The job.
        cluster: Its namespace.
        watch: The same namespace; the followers of one watch share a view of all jobs.
        wake: Called when other jobs have changed, and after an action.
    """

    def __init__(
        self, snapshot: JobSnapshot, cluster: Cluster, watch: ClusterWatch, wake: Callable[[], None]
    ) -> None:
        self._snapshot, self._cluster, self._watch, self._wake = snapshot, cluster, watch, wake
        self._others: _Others | None = None
        self._patching: asyncio.Task[None] | None = None
        self._patched = ""
        """The resource version of the last action: then the watch must show a later one."""
        self._trouble = ""
        """Why the last action failed; empty: it did not."""

    @property
    def waits(self) -> bool:
        """Whether the job waits for room, so that the other jobs are watched."""
        return self._others is not None

    def take_turn(self, *, met: bool, now: float) -> str:
        """Give back or resume if it is the job's turn; return what the job waits for, empty: nothing.

        Args:
            met: Whether its ranks have met: then the job keeps its pods.
            now: Seconds since the epoch, by the cluster's clock.
        """
        mine = self._waiting_job(met=met, now=now)
        if mine is None:
            self._leave()
            return ""
        if self._others is None:
            self._others = _Others.of(self._watch, self._cluster)
            self._others.join(self._wake)
        if not self._others.is_complete:
            return ""
        jobs, holders = self._others.jobs_and_holders(now)
        decision = self._others.turns.decide(mine, now)
        if decision is not None and (self._patching is None or self._patching.done()):
            job, note = decision
            if job.version != self._patched:
                self._patched = job.version
                self._patching = asyncio.create_task(self._send_note(job, note))
        return "\n".join(filter(None, [waits_for(mine, jobs, holders), self._trouble]))

    def _waiting_job(self, *, met: bool, now: float) -> Job | None:
        """Summarize the job; None: it needs no turn, as it has its pods or another scheduler decides."""
        snapshot = self._snapshot
        if snapshot.job is None or (met and not snapshot.given_back):  # a training calls this for each line
            return None
        mine = job_of(snapshot.job, snapshot.job_kind, snapshot.pods, now)
        if mine is None:
            return None
        mine = mine._replace(stuck=claim_mounted_elsewhere(snapshot.pods, snapshot.events))
        return mine if mine.given_back or mine.refused or mine.stuck else None

    def close(self) -> None:
        """Stop watching. A request that was already sent may still take effect; the next follower sees it."""
        self._leave()
        if self._patching is not None:
            self._patching.cancel()

    async def _send_note(self, job: Job, note: Note) -> None:
        """Send the patch that suspends or resumes a job, with the note."""
        try:
            change = patch(job.kind, note, job.version)
            await asyncio.to_thread(self._cluster.patch, job.kind.kind, job.name, change)
            self._trouble = ""
        except FAILURES as error:
            outdated = isinstance(error, (NotFoundError, ConflictError))  # the job has changed, or is gone
            self._trouble = "" if outdated else f"its turn cannot be taken: {error}"
            is_forbidden = isinstance(error, (UnauthorizedError, ForbiddenError))
            # Forget the patch, so that the next round tries again, unless the API server forbade it: then the
            # same patch would be forbidden again, and the next try is after the job has changed.
            if not is_forbidden:
                self._patched = ""
        self._wake()

    def _leave(self) -> None:
        """Stop watching the other jobs."""
        if self._others is not None:
            self._others.leave(self._wake)
            self._others = None


class _JobsAndHolders(NamedTuple):
    jobs: list[Job]
    """The jobs that wait or run."""
    holders: set[str]
    """The runs whose pods have nodes."""


class _Others(SharedView):
    """All jobs of manycpu in a namespace and their pods, watched while a follower needs them."""

    def __init__(self, watch: ClusterWatch, cluster: Cluster) -> None:
        super().__init__(watch, cluster)
        self._jobs, self._read_changes, self._read_time = _JobsAndHolders([], set()), -1, 0.0
        self.turns = Turns()
        self._unreadable: set[str] = set()  # uids of jobs that were logged

    def selections(self) -> Selections:
        """Select pods, and the kinds of job that the cluster serves and this account may list."""
        kinds = [kind.kind for kind in JOB_KINDS.values() if self._is_served(kind.kind)]
        return dict.fromkeys([*kinds, "Pod"], _SELECTION)

    def _is_served(self, kind: str) -> bool:
        try:
            self._cluster.call("GET", self._cluster.path(kind), query={"limit": "1"})
        except (ForbiddenError, NotFoundError):
            return False
        return True

    def jobs_and_holders(self, now: float) -> _JobsAndHolders:
        """Read all jobs and their pods, once for all followers."""
        if self._read_changes != self.changes or now - self._read_time > RETRY_INTERVAL_S:
            self._read_changes, self._read_time = self.changes, now
            self._jobs = self._read_all(self.objects(), now)
        return self._jobs

    def _read_all(self, objects: dict[str, list[KubeObject]], now: float) -> _JobsAndHolders:
        """Summarize the jobs, and update the turns."""
        job_pods = [pod for pod in objects.get("Pod", ()) if role(pod)]
        by_attempt: dict[tuple[str, str], list[KubeObject]] = {}
        for pod in job_pods:
            by_attempt.setdefault(attempt_key(pod), []).append(pod)
        jobs = []
        for kind in JOB_KINDS.values():
            for item in objects.get(kind.kind, ()):
                job = self._summarize(item, kind, by_attempt.get(attempt_key(item), ()), now)
                if job is not None:
                    jobs.append(job)
        holders: set[str] = set()
        mounts: dict[str, set[str]] = {}
        for pod in job_pods:
            if scheduled(pod) is not None and not ended(pod):
                holders.add(label(pod, "run"))
                for claim in claims_of(pod):
                    mounts.setdefault(claim, set()).add(label(pod, "run"))
        self.turns.update(jobs, mounts, now)
        return _JobsAndHolders(jobs, holders)

    def _summarize(
        self, job: KubeObject, kind: JobKind, pods: Iterable[KubeObject], now: float
    ) -> Job | None:
        """Summarize a job and its pods; None: it takes no turns, or cannot be read."""
        try:
            return job_of(job, kind, pods, now)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            meta = job["metadata"]
            if meta["uid"] not in self._unreadable:  # written by another version, or changed by a person
                self._unreadable.add(meta["uid"])
                name, why = meta["name"], f"{type(error).__name__} {error}"
                _log.warning("%s %s is left out of the turns, it cannot be read: %s", kind.kind, name, why)
            return None


class LauncherRelease:
    """Lets mpi-operator resume the launcher of one MPIJob that was suspended after its launcher had started.

    Before that, the operator has to clear ``status.startTime`` of the launcher Job, and its role (as of 0.8)
    does not allow that: the MPIJob would stay without a launcher. So manycpu clears it, with its own rights.

    Args:
        snapshot: The MPIJob; jobs of other kinds are ignored.
        cluster: Its namespace.
    """

    def __init__(self, snapshot: JobSnapshot, cluster: Cluster) -> None:
        self._snapshot, self._cluster = snapshot, cluster
        self._task: asyncio.Task[None] | None = None
        self._handled: tuple[bool, float] | None = None
        """Whether the job was suspended or resumed last, and when, as of the last release."""

    def release_after_change(self, *, began: bool) -> None:
        """Start to release the launcher, once for each time that the job was suspended or resumed.

        Args:
            began: Whether the job ever had nodes: before that, no launcher has started.
        """
        snapshot = self._snapshot
        change = (snapshot.suspended, snapshot.last_transition)
        if snapshot.job_kind.launcher and began and snapshot.last_transition and change != self._handled:
            self.close()
            self._handled, self._task = change, asyncio.create_task(self._release())

    def close(self) -> None:
        """Cancel a release that has not finished."""
        if self._task is not None:
            self._task.cancel()

    async def _release(self) -> None:
        """Retry until the launcher is released."""
        while True:
            with suppress(*FAILURES):  # retry: if no retry works, a time budget ends the wait
                if await asyncio.to_thread(self._release_once):
                    return
            await asyncio.sleep(_LAUNCHER_INTERVAL_S)

    def _release_once(self) -> bool:
        """Clear the start time of a suspended launcher; return whether nothing is left to do."""
        name = f"{self._snapshot.name}-launcher"
        launcher = self._cluster.get("Job", name)
        owners = launcher["metadata"].get("ownerReferences", ()) if launcher else ()
        if launcher is None or self._snapshot.uid not in [owner["uid"] for owner in owners]:
            return True
        if not launcher["spec"].get("suspend"):
            return not self._snapshot.suspended  # a suspended job's operator has yet to suspend the launcher
        if launcher.get("status", {}).get("startTime"):
            self._cluster.patch("Job", f"{name}/status", {"status": {"startTime": None}})
        return True
