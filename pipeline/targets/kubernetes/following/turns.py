"""Decide which run gives back its pods and which tries next, if runs of a namespace wait for room. Pure.

Each follower decides this for its own job, from the same jobs and pods. A job whose ranks cannot all be
placed gives back its pods, and tries again when other runs hold less, the oldest job first. If no waiting job
of the namespace can use its pods, it keeps them for a minute or two. Then it frees them for a moment, for
jobs of other namespaces, which are not visible here. A job does not try if an older job was refused that asks
for as much or less: so equal jobs keep their order.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from manycpu.pipeline.targets.kubernetes.following.demand import Job

__all__ = ["Decision", "Turns"]

Holding = Mapping[str, int]
"""Run -> how many of its pods have a node."""


class Decision(NamedTuple):
    """The action to take now."""

    act: Literal["stay", "give back", "resume"] = "stay"
    job: Job | None = None
    """The job to act on."""
    owing: Job | None = None
    """The job whose follower has to act before this job can; that follower may be gone."""


STAY = Decision()
_HOLD: Final = 90.0  # seconds, about, that a job which cannot start keeps its pods
_REST: Final = 30.0  # seconds, about, that jobs of other namespaces then have to take the room
_RAREST: Final = 6  # maximum factor on both times, which grow with each try
_PATIENCE: Final = 30.0  # seconds before an unresponsive follower is presumed dead


class Turns:
    """Decides for one job, again and again, and remembers which other jobs owe an action, and since when."""

    def __init__(self) -> None:
        self._owing: dict[str, tuple[object, float]] = {}

    def decide(self, mine: Job, others: Sequence[Job], holding: Holding, now: float) -> Decision:
        """Decide whether a job gives back, resumes or stays; or whether an unresponsive other gives back.

        Args:
            mine: The job.
            others: The other jobs of manycpu in the namespace.
            holding: Run -> how many of its pods have a node, this job's run included.
            now: Seconds since the epoch, by the cluster's clock.
        """
        states = {job.uid: _state(job) for job in others}
        self._owing = {uid: debt for uid, debt in self._owing.items() if states.get(uid) == debt[0]}
        absent = {uid for uid, (_, since) in self._owing.items() if now - since > _PATIENCE}
        decision = _decide(mine, [job for job in others if job.uid not in absent], holding, now)
        if (owing := decision.owing) is None:
            return decision
        _, since = self._owing.setdefault(owing.uid, (_state(owing), now))
        able = owing.trying and not owing.underway
        overdue = able and now - since >= _PATIENCE
        return Decision("give back", owing) if overdue else STAY


def _decide(mine: Job, others: Iterable[Job], holding: Holding, now: float) -> Decision:
    """Decide for a job that waits, or name the other job that has to act first."""
    counted = sorted((q for q in others if _contends(q, mine)), key=_age)
    if mine.given_back:
        return _given_back(mine, counted, holding, now)
    return _trying(mine, counted, holding, now) if mine.refused else STAY


def _trying(mine: Job, others: Sequence[Job], holding: Holding, now: float) -> Decision:
    if any(q.age < mine.age for q in others):
        return Decision("give back", mine)
    if holder := next((q for q in others if q.trying and q.refused and q.placed), None):
        return Decision(owing=holder)
    without = {run: count for run, count in holding.items() if run != mine.run}
    in_vain = mine.placed and mine.short and now - mine.since > _HOLD * _spread(mine)
    if in_vain or _candidate([mine, *others], without, now):
        return Decision("give back", mine)
    return STAY


def _given_back(mine: Job, others: Sequence[Job], holding: Holding, now: float) -> Decision:
    if mine.pods:
        return STAY  # pods of its last try still exist
    older = [q for q in others if q.age < mine.age]
    fits = _may_fit(mine, holding, now)
    if first := next((q for q in older if q.trying), None):
        owes = first.refused and fits and not _covers(first, mine)
        return Decision(owing=first if owes else None)
    if first := next((q for q in older if _may_fit(q, holding, now)), None):
        return Decision(owing=first)
    if fits and not any(_covers(q, mine) for q in older):
        return Decision("resume", mine)
    return STAY if any(q.trying for q in others) else _last(mine, others, holding, now)


def _last(mine: Job, others: Sequence[Job], holding: Holding, now: float) -> Decision:
    """Decide if no job tries: the first job that may fit now is next, otherwise the oldest."""
    waiting = sorted([mine, *others], key=_age)
    following = _candidate(waiting, holding, now) or waiting[0]
    if following is not mine:
        return Decision(owing=following)
    # The oldest job resumes, so that its pods wait in the scheduler. Pods do not help to wait for a claim
    # that another run has mounted. Jobs of other namespaces first get a moment to take what it gave back.
    rests = mine.note is not None and (mine.note.claim or now - mine.note.at < _REST * _spread(mine))
    return STAY if rests else Decision("resume", mine)


def _spread(job: Job) -> float:
    """Return a factor of at least 0.5 for waiting times: it differs by job, and grows with the tries."""
    tries = job.note.tries if job.note else 0
    chance = zlib.crc32(f"{job.uid}/{tries}".encode()) / 2**32
    return (0.5 + chance) * min(tries + 1, _RAREST)


def _contends(other: Job, mine: Job) -> bool:
    """Whether another job competes with this one, for room or for the same claim."""
    if other.given_back and other.note is not None:
        return bool(other.note.short) or other.note.claim in mine.claims
    return other.trying and not (other.refused and not other.placed and not other.short)


def _candidate(waiting: Sequence[Job], holding: Holding, now: float) -> Job | None:
    """Find the first job that gave back its pods, may fit now, and is not ruled out by a job before it.

    The jobs are sorted, the oldest first. The oldest itself is skipped.
    """
    for number, job in enumerate(waiting[1:], start=1):
        blocked = any(
            _covers(q, job) and not (q.given_back and _may_fit(q, holding, now)) for q in waiting[:number]
        )
        if job.given_back and not blocked and _may_fit(job, holding, now):
            return job
    return None


def _covers(refused: Job, job: Job) -> bool:
    """Whether the refusal of one job shows that another, which asks for as much or more, cannot fit."""
    note = refused.note if refused.given_back else None
    if note is not None and note.claim:
        return note.claim in job.claims
    short = note.short if note is not None else refused.short
    less = all(amount <= job.ask.get(resource, 0) for resource, amount in refused.ask.items())
    return bool(short) and refused.place == job.place and refused.need <= job.need and less


def _may_fit(job: Job, holding: Holding, now: float) -> bool:
    """Whether a run holds fewer pods than when this job was refused, or the job's next try is due."""
    if job.note is None:
        return False
    others = {run: count for run, count in job.note.held.items() if run != job.run}
    return now >= job.note.due or any(holding.get(run, 0) < count for run, count in others.items())


def _age(job: Job) -> tuple[float, str]:
    return job.age


def _state(job: Job) -> object:
    return job.given_back, job.note
