"""Whose turn it is, where several runs wait for room in one namespace. Pure.

Each follower computes this alone, for its own job, from what all of them see. A job whose ranks cannot all
be placed gives back what it holds, and tries again when others hold less; the oldest goes first. Where nobody
who waits could use what it holds it keeps that for a minute or two, and then leaves it for a moment to
whoever waits in another namespace, whom nobody sees from here. What asks for at least as much as an older one
that was refused is not tried: so those that are alike keep their order.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from manycpu.pipeline.targets.kubernetes.following.demand import Job

__all__ = ["Decision", "Turns"]

Holding = Mapping[str, int]
"""Run -> how many of its pods have a node."""


class Decision(NamedTuple):
    """What is to be done now."""

    act: Literal["stay", "give back", "resume"] = "stay"
    job: Job | None = None
    """Which job it is done to."""
    owing: Job | None = None
    """The job that has to act before this one can; its follower may be gone."""


STAY = Decision()
_HOLD: Final = 90.0  # seconds, about, that a job holds in vain: others may wait for that in other namespaces
_REST: Final = 30.0  # seconds, about, that it leaves them to take it
_RAREST: Final = 6  # times as long as that, at most
_PATIENCE: Final = 30.0  # seconds that a job may owe an act before nobody is thought to follow it


class Turns:
    """Decides for one job, look after look, and remembers who owes an act, and since when."""

    def __init__(self) -> None:
        self._owing: dict[str, tuple[object, float]] = {}

    def decide(self, mine: Job, others: Sequence[Job], holding: Holding, now: float) -> Decision:
        """Decide what becomes of a job that waits, or of one that it waits for in vain.

        Args:
            mine: The job.
            others: The others of ours in the namespace.
            holding: Who has how much, this job included.
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
    """Decide what becomes of a job that waits; or say which other has to act before it can."""
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
        return STAY  # those of its last try are still going
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
    """Decide where nobody tries: whoever might fit goes first, then the oldest waits for room."""
    waiting = sorted([mine, *others], key=_age)
    following = _candidate(waiting, holding, now) or waiting[0]
    if following is not mine:
        return Decision(owing=following)
    # A node is waited for with what is held already; a claim that another has mounted is not. Whoever waits
    # in another namespace needs a moment to take what was given back.
    rests = mine.note is not None and (mine.note.claim or now - mine.note.at < _REST * _spread(mine))
    return STAY if rests else Decision("resume", mine)


def _spread(job: Job) -> float:
    """Spread what jobs of several namespaces do at a time, and make it rarer with each try; 0.5 at least."""
    tries = job.note.tries if job.note else 0
    chance = zlib.crc32(f"{job.uid}/{tries}".encode()) / 2**32
    return (0.5 + chance) * min(tries + 1, _RAREST)


def _contends(other: Job, mine: Job) -> bool:
    """Whether a job wants what this one wants: room, or the same claim."""
    if other.given_back and other.note is not None:
        return bool(other.note.short) or other.note.claim in mine.claims
    return other.trying and not (other.refused and not other.placed and not other.short)


def _candidate(waiting: Sequence[Job], holding: Holding, now: float) -> Job | None:
    """Find a job that gave back and might fit now, where nobody before it shows that it cannot.

    Of all who wait, the oldest first, the first is passed over.
    """
    for number, job in enumerate(waiting[1:], start=1):
        blocked = any(
            _covers(q, job) and not (q.given_back and _may_fit(q, holding, now)) for q in waiting[:number]
        )
        if job.given_back and not blocked and _may_fit(job, holding, now):
            return job
    return None


def _covers(refused: Job, job: Job) -> bool:
    """Whether a job that was refused shows that another one, which asks for as much or more, cannot fit."""
    note = refused.note if refused.given_back else None
    if note is not None and note.claim:
        return note.claim in job.claims
    short = note.short if note is not None else refused.short
    less = all(amount <= job.ask.get(resource, 0) for resource, amount in refused.ask.items())
    return bool(short) and refused.place == job.place and refused.need <= job.need and less


def _may_fit(job: Job, holding: Holding, now: float) -> bool:
    """Whether any who held something when the job was refused holds less of it now, or its time has come."""
    if job.note is None:
        return False
    others = {run: count for run, count in job.note.held.items() if run != job.run}
    return now >= job.note.due or any(holding.get(run, 0) < count for run, count in others.items())


def _age(job: Job) -> tuple[float, str]:
    return job.age


def _state(job: Job) -> object:
    return job.given_back, job.note
