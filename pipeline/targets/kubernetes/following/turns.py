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
_PLACEMENT_FIELDS: Final = ("nodeSelector", "tolerations", "priorityClassName")
_INSUFFICIENT: Final = re.compile(r"Insufficient ([\w./-]+?)(?=[,. ]|$)")
_GANG_LABELS: Final = ("scheduling.k8s.io/group-name", "scheduling.x-k8s.io/pod-group")
_MAX_NAMED_RUNS: Final = 4  # maximum number of runs that a message names


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
    """Whether the cluster has no room for one of its pods: the scheduler or a quota refused it."""
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


def read_note(job: KubeObject | None) -> Note | None:
    """Read the note of a job; None: it has none."""
    text = ((job or {}).get("metadata", {}).get("annotations") or {}).get(_NOTE)
    try:
        return Note.model_validate_json(text) if text else None
    except ValidationError:  # written by another version, or by a person
        return None


def has_given_back(kind: JobKind, job: KubeObject) -> bool:
    """Whether a job is suspended because it gave back its pods, and waits for its turn."""
    note = read_note(job)
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
    pods, meta, note = list(pods), job["metadata"], read_note(job)
    demand, given_back = JOB_LAUNCHERS[kind.launch].ranks(job), has_given_back(kind, job)
    others_decide = (
        kind.suspend is None
        or QUEUE_LABEL in meta.get("labels", {})
        or any(_has_other_scheduler(pod) for pod in pods)
        or (kind.suspended(job) and not given_back)
    )
    if others_decide or demand is None or is_being_deleted(job) or kind.end(job) is not None:
        return None
    need, spec = demand
    created = epoch(meta["creationTimestamp"])
    since = max(created, note.resumed if note else 0.0)
    ranks = [pod for pod in pods if label(pod, "role") == "rank"]
    placed = sum(scheduled(pod) is not None and pod["status"].get("phase") != "Failed" for pod in ranks)
    creation_times = [epoch(pod["metadata"]["creationTimestamp"]) for pod in pods] or [now]
    over_quota = 0 < len(ranks) < need and now - min(creation_times) > _CREATION_S
    messages = [text for pod in pods if (text := unschedulable(pod)) is not None]
    insufficient = sorted({*_INSUFFICIENT.findall("\n".join(messages))})
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
        ask=_total_requests(spec),
        place=_placement_rules(spec),
        claims=claims_of({"spec": spec}),
        note=note,
        given_back=given_back,
        pods=len(pods),
        placed=placed,
        trying=trying and (bool(pods) or now - since < _CREATION_S),
        refused=trying and (bool(messages) or over_quota),
        short=("quota",) if over_quota else tuple(insufficient),
        underway=max(creation_times) - min(creation_times) > _START_S,
        since=since,
    )


def _has_other_scheduler(pod: KubeObject) -> bool:
    """Whether another scheduler, a scheduling gate or a gang decides when a pod gets its node."""
    spec, meta = pod["spec"], pod["metadata"]
    if spec.get("schedulerName", "default-scheduler") != "default-scheduler" or spec.get("schedulingGates"):
        return True
    names = {*meta.get("labels", {}), *meta.get("annotations", {})}
    return any(name in names for name in _GANG_LABELS)


def _total_requests(spec: KubeObject) -> dict[str, Decimal]:
    """Add up the requests of a pod's containers: resource -> amount."""
    totals: dict[str, Decimal] = {}
    for container in spec["containers"]:
        for name, quantity in container.get("resources", {}).get("requests", {}).items():
            totals[name] = totals.get(name, Decimal(0)) + amount(quantity)
    return totals


def _placement_rules(spec: KubeObject) -> str:
    """Write the rules for where a pod may run as text, which is equal for equal rules."""
    anti_affinity = spec.get("affinity", {}).get("podAntiAffinity", {})
    needs_own_machine = "requiredDuringSchedulingIgnoredDuringExecution" in anti_affinity
    fields = {name: spec.get(name) for name in _PLACEMENT_FIELDS}
    return json.dumps([fields, needs_own_machine], sort_keys=True)


class Turns:
    """Decides which jobs of a namespace give back their pods or resume, for all followers in this process."""

    def __init__(self) -> None:
        self._jobs: list[Job] = []
        self._mounts: Mapping[str, AbstractSet[str]] = {}
        self._due_since: dict[tuple[str, str], float] = {}
        """Uid and resource version of each job whose follower should act -> since when, by the clock."""
        self._unattended: list[Job] = []
        """Jobs whose followers are presumed dead."""

    def update(self, jobs: Iterable[Job], mounts: Mapping[str, AbstractSet[str]], now: float) -> None:
        """Store the present state of the namespace, once for all followers; find jobs without a follower.

        Args:
            jobs: The jobs of manycpu.
            mounts: Claim -> runs whose pods mount it.
            now: Seconds since the epoch, by the cluster's clock.
        """
        self._jobs, self._mounts = sorted(jobs, key=lambda job: job.age), mounts
        waiting = [job for job in self._jobs if job.waits and not job.underway]
        due = {
            (job.uid, job.version): job
            for job in waiting
            if _next_note(job, self._older(job), mounts, now) is not None
        }
        self._due_since = {key: self._due_since.get(key, now) for key in due}
        self._unattended = [
            due[key] for key, since in self._due_since.items() if now - since > _FOLLOWER_TIMEOUT_S
        ]

    def decide(self, mine: Job, now: float) -> tuple[Job, Note] | None:
        """Return a job and the note with which it gives back its pods or resumes; None: nothing is to do.

        The job is mostly this one. It is another one if that holds what others need and its follower, which
        should have given it back, does not act.
        """
        unattended = [job for job in self._unattended if job.uid != mine.uid]
        for job in unattended:
            if not job.given_back:
                note = _next_note(job, self._older(job), self._mounts, now)
                if note is not None:
                    return job, note
        attended = (job for job in self._older(mine) if job not in unattended)
        note = _next_note(mine, attended, self._mounts, now)
        return (mine, note) if note is not None else None

    def _older(self, mine: Job) -> Iterator[Job]:
        """Yield the jobs that are older than this one, the oldest first."""
        return takewhile(lambda job: job.age < mine.age, self._jobs)


def _next_note(
    job: Job, older: Iterator[Job], mounts: Mapping[str, AbstractSet[str]], now: float
) -> Note | None:
    """Return the note with which a job gives back its pods or resumes now; None: it stays as it is.

    Args:
        job: The job.
        older: The older jobs, the oldest first; only as many are read as the decision needs.
        mounts: Claim -> runs whose pods mount it.
        now: Seconds since the epoch.
    """
    claim = job.stuck or job.claim
    claim_is_held = bool(mounts.get(claim, set()) - {job.run})  # by pods of other runs
    older_waiting = (
        other for other in older if other.waits and (not other.claim or other.claim in job.claims)
    )
    first = next(older_waiting, None)
    if job.given_back and job.note is not None:
        if job.pods:
            return None  # its earlier pods are still being deleted
        if first is None:
            may_try = now >= (job.note.due if claim_is_held else job.note.rests)
        else:  # the first job mostly decides: jobs are alike, and there may be a thousand
            may_try = now >= job.note.due and not any(
                (other.trying and other.placed) or other.covers(job)
                for other in chain([first], older_waiting)
            )
        return job.note.model_copy(update={"resumed": now}) if may_try else None
    tries = job.note.tries if job.note else 0
    factor = min(tries + 1, _MAX_FACTOR) * job.jitter
    if job.stuck:
        gives_back = claim_is_held
    else:
        holds_in_vain = bool(job.placed and job.short) and now - job.since > _HOLD_S * factor
        gives_back = job.refused and (first is not None or holds_in_vain)
    if not gives_back:
        return None
    rest_s = 0.0 if first or claim_is_held else _REST_S * factor
    pause_s = _PAUSE_S * min(2 ** min(tries, 4), 10) * job.jitter
    return Note(
        at=now,
        tries=tries + 1,
        short=() if claim else job.short,
        claim=claim,
        rests=now + rest_s,
        due=now + pause_s,
    )


def claim_mounted_elsewhere(pods: Iterable[KubeObject], events: Iterable[KubeObject]) -> str:
    """Return the claim that a pod cannot mount, since it is mounted on another node; empty: there is none."""
    warned = {
        event["involvedObject"].get("uid")
        for event in events
        if event.get("reason") == "FailedAttachVolume" and "Multi-Attach" in event.get("message", "")
    }
    for pod in pods:
        statuses = pod.get("status", {}).get("containerStatuses") or ()
        started = any({"running", "terminated"} & status["state"].keys() for status in statuses)
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
    lacking_nodes = mine.need - (0 if mine.given_back else mine.placed)
    short = note.short if note else mine.short
    amounts = [_format_amount(name, mine.ask[name] * lacking_nodes) for name in short if name in mine.ask]
    if lacking_nodes <= 0:
        room = "a node for its launcher"
    elif amounts:
        room = " and ".join(amounts)
    else:
        room = f"{lacking_nodes} node{'' if lacking_nodes == 1 else 's'}"
    before = [job.run for job in sorted(jobs, key=lambda job: job.age) if job.waits and job.age < mine.age]
    others = sorted({*holders} - {mine.run})
    by = f"held by {_name_runs(others)}" if others else "no run of this namespace holds any"
    after = f"; after {_name_runs(before)}" if before else ""
    return f"waits for {room}; {by}{after}"


def _format_amount(resource: str, total: Decimal) -> str:
    """Write an amount of a resource for people: memory is in bytes, cpu in cores."""
    if resource == "memory":
        return f"{float(total) / 2**30:.3g} GiB of memory"
    unit = resource
    if resource == "cpu":
        unit = "CPU" if total == 1 else "CPUs"
    return f"{total.normalize():f} {unit}"


def _name_runs(names: list[str]) -> str:
    """Name runs, at least one, for a message."""
    if len(names) == 1:
        return f"run {names[0]}"
    if len(names) > _MAX_NAMED_RUNS:
        names = [*names[:_MAX_NAMED_RUNS], f"{len(names) - _MAX_NAMED_RUNS} more"]
    return f"runs {', '.join(names[:-1])} and {names[-1]}"
