"""Give back what a job holds while its ranks cannot all be placed, and try again when it is its turn."""

import asyncio
import weakref
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Final

from manycpu.pipeline.adapters.cluster import Cluster, Manifest
from manycpu.pipeline.adapters.cluster_watch import FAILURES, ClusterWatch
from manycpu.pipeline.launchers.given_back import Note, patch
from manycpu.pipeline.spec.errors import ClusterError
from manycpu.pipeline.verbs.context import ClusterContext
from manycpu.pipeline.verbs.on_kubernetes.gang import JOBS, OWNER, Gang
from manycpu.pipeline.verbs.on_kubernetes.present import Present
from manycpu.pipeline.verbs.on_kubernetes.turns import Decision, decide
from manycpu.pipeline.verbs.on_kubernetes.waiting import Job, holding, job_of, lacking, on_claims, unmountable

__all__ = ["TurnTaking"]

_OURS: Final = {"labelSelector": "app.kubernetes.io/managed-by=manycpu"}
_PATIENCE: Final = 30.0  # seconds that a job may owe an act before nobody is thought to follow it
_AGAIN: Final = 5.0  # seconds between tries to see the others, and between looks while they do not change
_SETTLE: Final = 0.3  # seconds in which changes are put together
_REFUSED: Final = (401, 403)
_PASSED: Final = (404, 409)  # it has changed meanwhile, or is gone: look again


class TurnTaking:
    """Acts for one job.

    Args:
        gang: The job.
        ctx: The run.
        watch: The run's namespace; all who follow jobs through it share what they see of the others.
        wake: Is called when the others have changed.
    """

    def __init__(
        self, gang: Gang, ctx: ClusterContext, watch: ClusterWatch, wake: Callable[[], None]
    ) -> None:
        self._gang, self._ctx, self._watch, self._wake = gang, ctx, watch, wake
        self._others: _Others | None = None
        self._acting: asyncio.Task[None] | None = None
        self._acted = ""
        self._owing: dict[str, tuple[object, float]] = {}
        self._trouble = ""

    @property
    def waits(self) -> bool:
        """Whether the job waits for room, so that the others are looked at."""
        return self._others is not None

    def look(self, *, met: bool, now: float) -> str:
        """Do what it is time for; say what the job waits for, empty where it does not.

        Args:
            met: Whether its ranks have ever met: then it keeps what it has.
            now: Seconds since the epoch, by the cluster's clock.
        """
        mine = self._mine(now) if self._gang.given_back or not met else None
        if mine is None or not (mine.given_back or mine.refused or mine.stuck):
            self._leave()
            return ""
        others = self._join()
        if not others.known:
            return ""
        jobs, pods = others.look(now)
        decision = self._decide(mine, [job for job in jobs if job.uid != mine.uid], pods, now)
        if decision.job is not None and (self._acting is None or self._acting.done()):
            self._act(decision, decision.job, pods, now)
        return "\n".join(filter(None, [lacking(mine, jobs, holding(pods)), self._trouble]))

    async def close(self) -> None:
        """Stop looking; what is being done is done."""
        self._leave()
        if self._acting is not None:
            await asyncio.wait([self._acting])

    def _mine(self, now: float) -> Job | None:
        job = self._gang.job
        found = job_of(job, self._gang.kind, self._gang.pods, now) if job else None
        return found and found._replace(stuck=unmountable(self._gang.pods, self._gang.events))

    def _decide(self, mine: Job, others: list[Job], pods: list[Manifest], now: float) -> Decision:
        if mine.stuck and on_claims(pods, mine):
            return Decision("give back", mine)
        decision = decide(mine, others, holding(pods), now, self._absent(others, now))
        owing = decision.owing
        if owing is None:
            self._owing = {
                uid: since for uid, since in self._owing.items() if uid in self._absent(others, now)
            }
            return decision
        _, since = self._owing.setdefault(owing.uid, (_state(owing), now))
        overdue = now - since > _PATIENCE and owing.trying and not owing.underway
        return Decision("give back", owing) if overdue else decision

    def _absent(self, others: list[Job], now: float) -> set[str]:
        """List the jobs that owe an act for so long that nobody seems to follow them."""
        states = {job.uid: _state(job) for job in others}
        self._owing = {uid: kept for uid, kept in self._owing.items() if states.get(uid) == kept[0]}
        return {uid for uid, (_, since) in self._owing.items() if now - since > _PATIENCE}

    def _act(self, decision: Decision, job: Job, pods: list[Manifest], now: float) -> None:
        if job.version == self._acted:
            return  # what was done is not seen yet
        self._acted = job.version
        if decision.act == "resume" and job.note is not None:
            note = job.note.model_copy(update={"resumed": now})
        else:
            note = _note(job, pods, now)
        self._acting = asyncio.create_task(self._patch(job, note))

    async def _patch(self, job: Job, note: Note) -> None:
        try:
            await asyncio.to_thread(self._ctx.cluster.patch, job.kind, job.name, patch(note, job.version))
            self._trouble = ""
        except FAILURES as error:
            status = getattr(error, "status", None)
            self._trouble = "" if status in _PASSED else f"its turn cannot be taken: {error}"
            self._acted = self._acted if status in _REFUSED else ""
        self._wake()

    def _join(self) -> "_Others":
        if self._others is None:
            self._others = _others_of(self._watch, self._ctx.cluster)
            self._others.join(self._wake)
        return self._others

    def _leave(self) -> None:
        if self._others is not None:
            self._others.leave(self._wake)
            self._others = None


def _note(job: Job, pods: list[Manifest], now: float) -> Note:
    tries = job.note.tries + 1 if job.note else 1
    if job.stuck:
        return Note(at=now, tries=tries, held=on_claims(pods, job), claim=job.stuck)
    held = {run: count for run, count in holding(pods).items() if run != job.run}
    return Note(at=now, tries=tries, held=held, short=job.short)


def _state(job: Job) -> object:
    return job.given_back, job.note and (job.note.at, job.note.resumed)


class _Others:
    """All jobs of ours in a namespace with their pods, for as long as anybody wants to see them."""

    def __init__(self, watch: ClusterWatch, cluster: Cluster) -> None:
        self._watch, self._cluster = watch, cluster
        self._wakes: list[Callable[[], None]] = []
        self._task: asyncio.Task[None] | None = None
        self._present, self._kinds = Present(), frozenset[str]()
        self._seen: tuple[list[Job], list[Manifest]] = ([], [])
        self._looked = 0.0
        self._changed = True
        self._waking: asyncio.TimerHandle | None = None

    @property
    def known(self) -> bool:
        """Whether all is known."""
        there = {change.kind for change in self._present.changes()}
        return bool(self._kinds) and self._kinds <= there

    def join(self, wake: Callable[[], None]) -> None:
        self._wakes.append(wake)
        if self._task is None:
            self._present, self._kinds = Present(), frozenset()
            self._task = asyncio.create_task(self._follow())

    def leave(self, wake: Callable[[], None]) -> None:
        self._wakes.remove(wake)
        if not self._wakes and self._task is not None:
            self._task.cancel()
            self._task = None

    def look(self, now: float) -> tuple[list[Job], list[Manifest]]:
        """Read all jobs and their pods, once for all who look."""
        if self._changed or now - self._looked > _AGAIN:
            self._changed, self._looked = False, now
            objects = {change.kind: change.objects for change in self._present.changes()}
            pods = objects.pop("Pod")
            by_job = _by_job(pods)
            jobs = [
                job_of(job, kind, by_job.get(job["metadata"]["name"], ()), now)
                for kind, found in objects.items()
                for job in found
            ]
            self._seen = [job for job in jobs if job is not None], pods
        return self._seen

    async def _follow(self) -> None:
        while True:
            try:
                kinds = await asyncio.to_thread(self._served)
            except FAILURES:
                await asyncio.sleep(_AGAIN)
                continue
            self._kinds = frozenset([*kinds, "Pod"])
            async with aclosing(self._watch.follow(dict.fromkeys(self._kinds, _OURS))) as changes:
                async for change in changes:
                    self._present.apply(change)
                    self._changed = True
                    if self._waking is None:
                        self._waking = asyncio.get_running_loop().call_later(_SETTLE, self._wake)

    def _served(self) -> list[str]:
        """List the kinds of job that this cluster has, and that this account may see."""
        return [kind for kind in JOBS.values() if _is_served(self._cluster, kind)]

    def _wake(self) -> None:
        self._waking = None
        for wake in self._wakes:
            wake()


_ALL: Final[weakref.WeakKeyDictionary[ClusterWatch, _Others]] = weakref.WeakKeyDictionary()


def _others_of(watch: ClusterWatch, cluster: Cluster) -> _Others:
    return _ALL.setdefault(watch, _Others(watch, cluster))


def _is_served(cluster: Cluster, kind: str) -> bool:
    try:
        cluster.call("GET", cluster.path(kind), query={"limit": "1"})
    except ClusterError as error:
        if error.status in (403, 404):
            return False
        raise
    return True


def _by_job(pods: list[Manifest]) -> Mapping[str, list[Manifest]]:
    found: dict[str, list[Manifest]] = {}
    for pod in pods:
        found.setdefault(pod["metadata"].get("labels", {}).get(OWNER, ""), []).append(pod)
    return found
