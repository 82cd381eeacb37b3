"""Give back a job's pods while its ranks cannot all be placed, and resume the job when it is its turn."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from manycpu.pipeline.adapters.cluster import Cluster
from manycpu.pipeline.adapters.cluster_watch import FAILURES, ClusterWatch
from manycpu.pipeline.launchers.given_back import Note, patch
from manycpu.pipeline.spec.errors import ConflictError, ForbiddenError, NotFoundError, UnauthorizedError
from manycpu.pipeline.spec.job_kinds import JOB_KINDS, JobKind
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.spec.naming import attempt_key
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, cluster_of
from manycpu.pipeline.targets.kubernetes.following.demand import (
    Job,
    given_back,
    holding,
    job_of,
    lacking,
    on_claims,
    resumed,
    unmountable,
)
from manycpu.pipeline.targets.kubernetes.following.job_snapshot import JobSnapshot, role
from manycpu.pipeline.targets.kubernetes.following.shared_view import AGAIN, Selections, SharedView
from manycpu.pipeline.targets.kubernetes.following.turns import Decision, Turns

__all__ = ["TurnTaking"]

_log = logging.getLogger(__name__)
_OURS: Final = {"labelSelector": "app.kubernetes.io/managed-by=manycpu"}


class TurnTaking:
    """Suspends one job while there is no room for it, and resumes it in its turn.

    Args:
        snapshot: The job.
        ctx: The run.
        watch: The run's namespace; the followers of one watch share a view of all jobs.
        wake: Called when other jobs have changed, and after an action.
    """

    def __init__(
        self, snapshot: JobSnapshot, ctx: ClusterContext, watch: ClusterWatch, wake: Callable[[], None]
    ) -> None:
        self._snapshot, self._ctx, self._watch, self._wake = snapshot, ctx, watch, wake
        self._others: _Others | None = None
        self._acting: asyncio.Task[None] | None = None
        self._acted = ""
        self._turns = Turns()
        self._trouble = ""

    @property
    def waits(self) -> bool:
        """Whether the job waits for room, so that the other jobs are watched."""
        return self._others is not None

    def look(self, *, met: bool, now: float) -> str:
        """Give back or resume if it is the job's turn; return what the job waits for, empty: nothing.

        Args:
            met: Whether its ranks have met: then the job keeps its pods.
            now: Seconds since the epoch, by the cluster's clock.
        """
        mine = self._mine(now) if self._snapshot.given_back or not met else None
        if mine is None or not (mine.given_back or mine.refused or mine.stuck):
            self._leave()
            return ""
        others = self._join()
        if not others.is_complete:
            return ""
        jobs = others.look(now)
        decision = self._decide(mine, jobs, now)
        if decision.job is not None and (self._acting is None or self._acting.done()):
            self._act(decision, decision.job, jobs.pods, now)
        return "\n".join(filter(None, [lacking(mine, jobs.jobs, jobs.held), self._trouble]))

    def close(self) -> None:
        """Stop watching. A request that was already sent may still take effect; the next follower sees it."""
        self._leave()
        if self._acting is not None:
            self._acting.cancel()

    def _mine(self, now: float) -> Job | None:
        job = self._snapshot.job
        mine = job_of(job, self._snapshot.job_kind, self._snapshot.pods, now) if job else None
        return mine and mine._replace(stuck=unmountable(self._snapshot.pods, self._snapshot.events))

    def _decide(self, mine: Job, jobs: "_Jobs", now: float) -> Decision:
        if mine.stuck and on_claims(jobs.pods, mine):
            return Decision("give back", mine)
        others = [job for job in jobs.jobs if job.uid != mine.uid]
        return self._turns.decide(mine, others, jobs.held, now)

    def _act(self, decision: Decision, job: Job, pods: list[KubeObject], now: float) -> None:
        if job.version == self._acted:
            return  # the watch does not show the last action yet
        self._acted = job.version
        note = resumed(job, now) if decision.act == "resume" else given_back(job, pods, now)
        self._acting = asyncio.create_task(self._patch(job, note))

    async def _patch(self, job: Job, note: Note) -> None:
        try:
            change = patch(job.kind, note, job.version)
            await asyncio.to_thread(cluster_of(self._ctx).patch, job.kind.kind, job.name, change)
            self._trouble = ""
        except FAILURES as error:
            outdated = isinstance(error, (NotFoundError, ConflictError))  # the job has changed, or is gone
            self._trouble = "" if outdated else f"its turn cannot be taken: {error}"
            refused = isinstance(error, (UnauthorizedError, ForbiddenError))
            self._acted = self._acted if refused else ""
        self._wake()

    def _join(self) -> "_Others":
        if self._others is None:
            self._others = _Others.of(self._watch, cluster_of(self._ctx))
            self._others.join(self._wake)
        return self._others

    def _leave(self) -> None:
        if self._others is not None:
            self._others.leave(self._wake)
            self._others = None


class _Jobs(NamedTuple):
    """The jobs that wait or run, all pods of manycpu, and how many pods of each run have a node."""

    jobs: list[Job]
    pods: list[KubeObject]
    held: dict[str, int]


class _Others(SharedView):
    """All jobs of manycpu in a namespace and their pods, watched while a follower needs them."""

    def __init__(self, watch: ClusterWatch, cluster: Cluster) -> None:
        super().__init__(watch, cluster)
        self._read, self._read_at, self._looked = _Jobs([], [], {}), -1, 0.0
        self._odd: set[str] = set()  # uids of jobs that were logged as unreadable

    def selections(self) -> Selections:
        """Select pods, and the kinds of job that the cluster serves and this account may list."""
        kinds = [kind.kind for kind in JOB_KINDS.values() if _is_served(self._cluster, kind.kind)]
        return dict.fromkeys([*kinds, "Pod"], _OURS)

    def look(self, now: float) -> _Jobs:
        """Read all jobs and their pods, once for all followers."""
        if self._read_at != self.changes or now - self._looked > AGAIN:
            self._read_at, self._looked = self.changes, now
            self._read = self._read_all(self.objects(), now)
        return self._read

    def _read_all(self, objects: dict[str, list[KubeObject]], now: float) -> _Jobs:
        pods = objects.pop("Pod")
        by_job: dict[tuple[str, str], list[KubeObject]] = {}
        for pod in filter(role, pods):
            by_job.setdefault(attempt_key(pod), []).append(pod)
        jobs = (
            self._job_of(job, kind, by_job.get(attempt_key(job), ()), now)
            for kind in JOB_KINDS.values()
            for job in objects.get(kind.kind, ())
        )
        return _Jobs([job for job in jobs if job is not None], pods, holding(pods))

    def _job_of(self, job: KubeObject, kind: JobKind, pods: Iterable[KubeObject], now: float) -> Job | None:
        try:
            return job_of(job, kind, pods, now)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            meta = job["metadata"]
            if meta["uid"] not in self._odd:  # written by another version, or changed by a person
                self._odd.add(meta["uid"])
                name, why = meta["name"], f"{type(error).__name__} {error}"
                _log.warning("%s %s is left out of the turns, it cannot be read: %s", kind.kind, name, why)
            return None


def _is_served(cluster: Cluster, kind: str) -> bool:
    try:
        cluster.call("GET", cluster.path(kind), query={"limit": "1"})
    except (ForbiddenError, NotFoundError):
        return False
    return True
