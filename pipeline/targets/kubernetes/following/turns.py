"""Decide when a job that cannot place all its pods gives them back, and when it tries again. Pure.

For jobs that no queue or gang scheduler admits. Each follower decides for its own job, from the jobs and pods
of the namespace, and for the job of a dead follower that holds what others need. A job that finds no room
gives back its pods at once if an older job waits; if not, it keeps them for a minute or two, then frees them
for a moment: jobs of other namespaces, not visible here, may need them. It tries again when no older
job waits; after a pause, it also tries if it may fit where the older jobs do not, as it asks for less. All
times have jitter, and grow with the number of tries.
"""

import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from decimal import Decimal
from itertools import chain, takewhile
from typing import Final, NamedTuple

from pydantic import BaseModel, ValidationError

from manycpu.pipeline.adapters.cluster import amount
from manycpu.pipeline.launchers import JOB_LAUNCHERS
from manycpu.pipeline.spec.job_kinds import QUEUE_LABEL, JobKind
from manycpu.pipeline.spec.kube_object import KubeObject, epoch, is_being_deleted
from manycpu.pipeline.spec.naming import label
from manycpu.pipeline.targets.kubernetes.pod_status import claims_of, scheduled, unschedulable

_NOTE: Final = "manycpu/given-back"
_HOLD_S: Final = 90.0  # about, that a job which cannot start keeps its pods
_REST_S: Final = 30.0  # about, that jobs of other namespaces then have to take the room
_PAUSE_S: Final = 60.0  # about, until a job tries again though an older job waits; doubled by each try
_MAX_FACTOR: Final = 6  # on all these times
_FOLLOWER_TIMEOUT_S: Final = 30.0  # after which the follower of a job that should act is presumed dead
_CREATION_S: Final = 20.0  # within which an operator creates all pods, unless a quota refuses them
_START_S: Final = 60.0  # maximum between the first and the last pod of one start
_PLACE: Final = ("nodeSelector", "tolerations", "priorityClassName")
_INSUFFICIENT: Final = re.compile(r"Insufficient ([\w./-]+?)(?=[,. ]|$)")
_GROUPS: Final = ("scheduling.k8s.io/group-name", "scheduling.x-k8s.io/pod-group")
_NAMED: Final = 4  # maximum number of runs that a message names


class Note(BaseModel):
    """The annotation of a job that gave back its pods; times are seconds since the epoch."""

    at: float
    tries: int = 1
    """How often the job has given back."""
    short: tuple[str, ...] = ()
    """Resources that were short, such as ``cpu``; empty: there was another obstacle."""
    claim: str = ""
    """The claim that another run's pods had mounted."""
    rests: float = 0.0
    """When the job tries again if no older job waits."""
    due: float = 0.0
    """When it tries again if it asks for less than the older jobs that wait."""
    resumed: float = 0.0
    """When the job tried again; 0: it has not."""


class Job(NamedTuple):
    """A job that has not ended, and that no other scheduler decides on."""

    name: str
    uid: str
    run: str
    kind: JobKind
    version: str
    """Its resourceVersion."""
    age: tuple[float, str]
    """The key that orders jobs: when the job was created, and its uid."""
    need: int
    """Number of rank pods without which the job cannot start."""
    ask: Mapping[str, Decimal]
    """Resource -> how much of it each rank pod requests."""
    place: str
    """The rules for where the pods may run: jobs with equal text compete for the same nodes."""
    claims: tuple[str, ...]
    note: Note | None
    given_back: bool
    pods: int
    """Number of its pods that exist, those being deleted included."""
    placed: int
    """Number of rank pods that have a node."""
    trying: bool
    """Whether the job is not suspended, and some of its ranks or its launcher still wait for a node."""
    refused: bool
    """Whether the cluster has no room for one of these pods: the scheduler or a quota refused it."""
    short: tuple[str, ...]
    """The resources that are short, or ``quota``; empty: there is another obstacle."""
    underway: bool
    """Whether a pod was created again, so that training had started."""
    since: float
    """When the job was created or last resumed, in seconds since the epoch."""
    stuck: str = ""
    """The claim that its pods cannot mount, because it is mounted on another node; empty: there is none."""

    @property
    def claim(self) -> str:
        """The claim for which the job gave back its pods; empty: it did so for room, or has not."""
        return self.note.claim if self.note is not None and self.given_back else ""

    @property
    def waits(self) -> bool:
        """Whether the job waits for what others may hold: room, or a claim."""
        if self.given_back and self.note is not None:
            return bool(self.note.short or self.note.claim)
        return self.trying and bool(self.placed or self.short or not self.refused)

    @property
    def jitter(self) -> float:
        """A factor from 0.5 to 1.5, which differs by job and try."""
        tries = self.note.tries if self.note else 0
        return 0.5 + random.Random(f"{self.uid}/{tries}").random()  # noqa: S311 - no secret

    def covers(self, other: "Job") -> bool:
        """Whether another job cannot fit if this one does not: it asks for as much or more."""
        if self.claim:
            return self.claim in other.claims
        less = all(number <= other.ask.get(resource, 0) for resource, number in self.ask.items())
        return self.place == other.place and self.need <= other.need and less


def note_of(job: KubeObject | None) -> Note | None:
    """Read the note of a job; None: it has none."""
    text = ((job or {}).get("metadata", {}).get("annotations") or {}).get(_NOTE)
    try:
        return Note.model_validate_json(text) if text else None
    except ValidationError:  # written by another version, or by a person
        return None


def has_given_back(kind: JobKind, job: KubeObject) -> bool:
    """Whether a job is suspended because it gave back its pods, and waits for its turn."""
    note = note_of(job)
    return kind.suspended(job) and note is not None and not note.resumed


def patch(kind: JobKind, note: Note, version: str) -> KubeObject:
    """Build the patch that suspends a job with a note, or resumes it if the note says so.

    Args:
        kind: The job's kind.
        note: The note.
        version: The resourceVersion of the decision: of two concurrent patches, the API refuses one.
    """
    meta = {"resourceVersion": version, "annotations": {_NOTE: note.model_dump_json()}}
    return {"metadata": meta, **kind.with_suspend(not note.resumed)}


def job_of(job: KubeObject, kind: JobKind, pods: Iterable[KubeObject], now: float) -> Job | None:
    """Summarize a job and its pods; None: it has ended, or a queue or another scheduler decides."""
    pods, meta, note = list(pods), job["metadata"], note_of(job)
    demand, given_back = JOB_LAUNCHERS[kind.launch].ranks(job), has_given_back(kind, job)
    left_to_others = (
        kind.suspend is None
        or QUEUE_LABEL in meta.get("labels", {})
        or any(map(_has_other_scheduler, pods))
        or (kind.suspended(job) and not given_back)
    )
    if left_to_others or demand is None or is_being_deleted(job) or kind.end(job) is not None:
        return None
    need, spec = demand
    created = epoch(meta["creationTimestamp"])
    since = max(created, note.resumed if note else 0.0)
    ranks = [pod for pod in pods if label(pod, "role") == "rank"]
    placed = sum(scheduled(pod) is not None and pod["status"].get("phase") != "Failed" for pod in ranks)
    births = [epoch(pod["metadata"]["creationTimestamp"]) for pod in pods] or [now]
    over_quota = 0 < len(ranks) < need and now - min(births) > _CREATION_S
    messages = [text for pod in pods if (text := unschedulable(pod)) is not None]
    launcher_waits = any(label(pod, "role") == "launcher" and scheduled(pod) is None for pod in pods)
    trying = not kind.suspended(job) and (placed < need or launcher_waits)
    return Job(
        name=meta["name"],
        uid=meta["uid"],
        run=label(job, "run"),
        kind=kind,
        version=meta.get("resourceVersion", ""),
        age=(created, meta["uid"]),
        need=need,
        ask=_requests(spec),
        place=_place(spec),
        claims=claims_of({"spec": spec}),
        note=note,
        given_back=given_back,
        pods=len(pods),
        placed=placed,
        trying=trying and (bool(pods) or now - since < _CREATION_S),
        refused=trying and (bool(messages) or over_quota),
        short=("quota",) if over_quota else tuple(sorted({*_INSUFFICIENT.findall("\n".join(messages))})),
        underway=max(births) - min(births) > _START_S,
        since=since,
    )


def _has_other_scheduler(pod: KubeObject) -> bool:
    marks = {**pod["metadata"].get("labels", {}), **pod["metadata"].get("annotations", {})}
    other = pod["spec"].get("schedulerName", "default-scheduler") != "default-scheduler"
    return other or bool(pod["spec"].get("schedulingGates")) or any(mark in marks for mark in _GROUPS)


def _requests(spec: KubeObject) -> dict[str, Decimal]:
    totals: dict[str, Decimal] = {}
    for container in spec["containers"]:
        for name, quantity in container.get("resources", {}).get("requests", {}).items():
            totals[name] = totals.get(name, Decimal(0)) + amount(quantity)
    return totals


def _place(spec: KubeObject) -> str:
    apart = spec.get("affinity", {}).get("podAntiAffinity", {})
    rule = "requiredDuringSchedulingIgnoredDuringExecution" in apart
    return json.dumps([{name: spec.get(name) for name in _PLACE}, rule], sort_keys=True)


class Turns:
    """Decides for the jobs of a namespace, and remembers since when followers should have acted."""

    def __init__(self) -> None:
        self._jobs: list[Job] = []
        self._mounts: Mapping[str, AbstractSet[str]] = {}
        self._owed: dict[tuple[str, str], float] = {}
        self._late: list[Job] = []

    def see(self, jobs: Iterable[Job], mounts: Mapping[str, AbstractSet[str]], now: float) -> None:
        """Take the present state of the namespace, once for all followers.

        Args:
            jobs: The jobs of manycpu.
            mounts: Claim -> runs whose pods mount it.
            now: Seconds since the epoch, by the cluster's clock.
        """
        self._jobs, self._mounts = sorted(jobs, key=lambda job: job.age), mounts
        waiting = (job for job in self._jobs if job.waits and not job.underway)
        owed = {(job.uid, job.version): job for job in waiting if _next(job, self._older(job), mounts, now)}
        self._owed = {key: self._owed.get(key, now) for key in owed}
        self._late = [owed[key] for key, since in self._owed.items() if now - since > _FOLLOWER_TIMEOUT_S]

    def decide(self, mine: Job, now: float) -> tuple[Job, Note] | None:
        """Return a job and the note with which it gives back its pods or resumes; None: nothing is to do.

        The job is mostly this one. It is another one if that holds what others need and its follower, which
        should have given it back, does not act.
        """
        late = [job for job in self._late if job.uid != mine.uid]
        for job in late:
            if not job.given_back and (note := _next(job, self._older(job), self._mounts, now)):
                return job, note
        note = _next(mine, (job for job in self._older(mine) if job not in late), self._mounts, now)
        return (mine, note) if note else None

    def _older(self, mine: Job) -> Iterator[Job]:
        return takewhile(lambda job: job.age < mine.age, self._jobs)


def _next(job: Job, older: Iterator[Job], mounts: Mapping[str, AbstractSet[str]], now: float) -> Note | None:
    """Return the note with which a job gives back or resumes now; None: it stays as it is."""
    tries = job.note.tries if job.note else 0
    claim = job.stuck or job.claim
    held = bool(mounts.get(claim, set()) - {job.run})
    before = (one for one in older if one.waits and (not one.claim or one.claim in job.claims))
    first = next(before, None)
    if job.given_back and job.note is not None:
        if first is None:
            may_try = now >= (job.note.due if held else job.note.rests)
        else:  # the first job mostly decides: jobs are alike, and there may be a thousand
            blocked = any((one.trying and one.placed) or one.covers(job) for one in chain([first], before))
            may_try = now >= job.note.due and not blocked
        return job.note.model_copy(update={"resumed": now}) if may_try and not job.pods else None
    factor = min(tries + 1, _MAX_FACTOR) * job.jitter
    in_vain = job.placed and job.short and now - job.since > _HOLD_S * factor
    if not (held if job.stuck else job.refused and (first or in_vain)):
        return None
    rest = 0.0 if first or held else _REST_S * factor
    pause = _PAUSE_S * min(2 ** min(tries, 4), 10) * job.jitter
    short = () if claim else job.short
    return Note(at=now, tries=tries + 1, short=short, claim=claim, rests=now + rest, due=now + pause)


def unmountable(pods: Iterable[KubeObject], events: Iterable[KubeObject]) -> str:
    """Return the claim that a pod cannot mount, since it is mounted on another node; empty: there is none."""
    warned = {
        event["involvedObject"].get("uid")
        for event in events
        if event.get("reason") == "FailedAttachVolume" and "Multi-Attach" in event.get("message", "")
    }
    for pod in pods:
        states = [status["state"] for status in pod.get("status", {}).get("containerStatuses") or ()]
        started = any("running" in state or "terminated" in state for state in states)
        if pod["metadata"]["uid"] in warned and not started:
            return next(iter(claims_of(pod)), "")
    return ""


def waits_for(mine: Job, jobs: Iterable[Job], holders: Iterable[str]) -> str:
    """Describe what a job waits for, and which runs hold it; empty: it does not wait for room."""
    note = mine.note if mine.given_back else None
    if claim := mine.stuck or (note and note.claim):
        return f"waits for claim {claim}, which is mounted on another node"
    if mine.trying and not mine.short:
        return ""  # it waits for something else than room
    number = mine.need - (0 if mine.given_back else mine.placed)
    short = note.short if note else mine.short
    amounts = [_amount(name, mine.ask[name] * number) for name in short if name in mine.ask]
    room = " and ".join(amounts) or f"{number} node{'' if number == 1 else 's'}"
    before = [job.run for job in sorted(jobs, key=lambda job: job.age) if job.waits and job.age < mine.age]
    others = sorted({*holders} - {mine.run})
    by = f"held by {_runs(others)}" if others else "no run of this namespace holds any"
    after = f"; after {_runs(before)}" if before else ""
    return f"waits for {room if number > 0 else 'a node for its launcher'}; {by}{after}"


def _amount(resource: str, total: Decimal) -> str:
    if resource == "memory":
        return f"{float(total) / 2**30:.3g} GiB of memory"
    unit = resource if resource != "cpu" else "CPU" if total == 1 else "CPUs"
    return f"{total.normalize():f} {unit}"


def _runs(names: list[str]) -> str:
    if len(names) > _NAMED:
        names = [*names[:_NAMED], f"{len(names) - _NAMED} more"]
    *first, last = names
    return f"runs {', '.join(first)} and {last}" if first else f"run {last}"
