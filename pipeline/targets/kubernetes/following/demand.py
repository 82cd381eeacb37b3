"""Read from jobs and pods which jobs wait for room, and for how much. Pure."""

import json
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Final, NamedTuple

from manycpu.pipeline.adapters.cluster import amount
from manycpu.pipeline.launchers import JOB_LAUNCHERS
from manycpu.pipeline.launchers.given_back import Note, has_given_back, note_of
from manycpu.pipeline.spec.job_kinds import QUEUE_LABEL, JobKind
from manycpu.pipeline.spec.kube_object import KubeObject, epoch, is_being_deleted
from manycpu.pipeline.spec.naming import label
from manycpu.pipeline.targets.kubernetes.following.job_snapshot import (
    role,
)
from manycpu.pipeline.targets.kubernetes.pod_status import claims_of, ended, scheduled, unschedulable

__all__ = ["Job", "given_back", "holding", "job_of", "lacking", "on_claims", "resumed", "unmountable"]

_GROUPS: Final = ("scheduling.k8s.io/group-name", "scheduling.x-k8s.io/pod-group")
_BEGINNING: Final = 10.0  # seconds within which the pods of a new or resumed job are created
_REFUSING: Final = (
    20.0  # seconds after the first pod within which all others are created, unless a quota refuses them
)
_AT_ONCE: Final = 60.0  # maximum seconds between the first and the last pod of one start
_PLACE: Final = ("nodeSelector", "tolerations", "priorityClassName")
_NAMED: Final = 4  # maximum number of runs that a message names
_INSUFFICIENT: Final = re.compile(r"Insufficient ([\w./-]+?)(?=[,. ]|$)")


class Job(NamedTuple):
    """A job that has not ended."""

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
    given_back: bool
    note: Note | None
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
    """Whether a pod was recreated, so that training had started."""
    since: float = 0.0
    """When the job was created or last resumed, in seconds since the epoch."""
    stuck: str = ""
    """The claim that its pods cannot mount, because it is mounted on another node; empty: there is none."""


def _left_to_others(job: KubeObject, kind: JobKind, pods: Iterable[KubeObject]) -> bool:
    """Whether a queue or scheduler decides when the job gets nodes, or the job cannot be suspended."""
    if kind.suspend is None or QUEUE_LABEL in job["metadata"].get("labels", {}):
        return True
    return any(map(_scheduled_by_others, pods)) or (kind.suspended(job) and not has_given_back(kind, job))


def job_of(job: KubeObject, kind: JobKind, pods: Iterable[KubeObject], now: float) -> Job | None:
    """Summarize a job and its pods; None: it has ended, or a queue or another scheduler decides.

    Args:
        job: The job.
        kind: Its kind.
        pods: Its pods.
        now: Seconds since the epoch, by the cluster's clock.
    """
    pods = list(pods)
    meta, note = job["metadata"], note_of(job)
    over = is_being_deleted(job) or kind.end(job) is not None
    demand = JOB_LAUNCHERS[kind.launch].ranks(job)
    if over or demand is None or _left_to_others(job, kind, pods):
        return None
    need, spec = demand
    ranks = [pod for pod in pods if role(pod) == "rank"]
    launchers = [pod for pod in pods if role(pod) == "launcher"]
    placed = sum(scheduled(pod) is not None and not _failed(pod) for pod in ranks)
    births = [epoch(pod["metadata"]["creationTimestamp"]) for pod in pods]
    words = [text for pod in pods if (text := unschedulable(pod)) is not None]
    unmade = 0 < len(ranks) < need and now - min(births) > _REFUSING
    trying = not kind.suspended(job) and (placed < need or any(scheduled(pod) is None for pod in launchers))
    begun = max(epoch(meta["creationTimestamp"]), note.resumed if note else 0.0)
    return Job(
        name=meta["name"],
        uid=meta["uid"],
        run=label(job, "run"),
        kind=kind,
        version=meta.get("resourceVersion", ""),
        age=(epoch(meta["creationTimestamp"]), meta["uid"]),
        need=need,
        ask=_requests(spec),
        place=_place(spec),
        claims=claims_of({"spec": spec}),
        given_back=has_given_back(kind, job),
        note=note,
        pods=len(pods),
        placed=placed,
        trying=trying and (bool(pods) or now - begun < _BEGINNING),
        refused=trying and (bool(words) or unmade),
        short=("quota",) if unmade else _insufficient(words),
        since=begun,
        underway=bool(births) and max(births) - min(births) > _AT_ONCE,
    )


def _failed(pod: KubeObject) -> bool:
    """Whether a pod has failed, so that another may replace it."""
    return bool((pod.get("status") or {}).get("phase") == "Failed")


def holding(pods: Iterable[KubeObject]) -> dict[str, int]:
    """Count the pods of each run's jobs that have a node and have not ended: run -> number."""
    counts: dict[str, int] = {}
    for pod in pods:
        if role(pod) and scheduled(pod) is not None and not ended(pod):
            counts[label(pod, "run")] = counts.get(label(pod, "run"), 0) + 1
    return counts


def on_claims(pods: Iterable[KubeObject], job: Job) -> dict[str, int]:
    """Count the pods of each other run that mount a claim of this job: run -> number."""
    others = (pod for pod in pods if label(pod, "run") != job.run)
    return holding(pod for pod in others if set(claims_of(pod)) & set(job.claims))


def given_back(job: Job, pods: Iterable[KubeObject], now: float) -> Note:
    """Build the note for a job that gives back its pods."""
    tries = job.note.tries + 1 if job.note else 1
    if job.stuck:
        return Note(at=now, tries=tries, held=on_claims(pods, job), claim=job.stuck)
    held = {run: count for run, count in holding(pods).items() if run != job.run}
    return Note(at=now, tries=tries, held=held, short=job.short)


def resumed(job: Job, now: float) -> Note:
    """Build the note for a job that resumes."""
    return (job.note or Note(at=now)).model_copy(update={"resumed": now})


def unmountable(pods: Iterable[KubeObject], events: Iterable[KubeObject]) -> str:
    """Return the claim that a pod cannot mount, since it is mounted on another node; empty: there is none."""
    warned = {event["involvedObject"].get("uid") for event in events if _is_multi_attach(event)}
    for pod in pods:
        statuses = pod.get("status", {}).get("containerStatuses") or ()
        waits = not any(
            "running" in status["state"] or "terminated" in status["state"] for status in statuses
        )
        if pod["metadata"]["uid"] in warned and waits:
            return next(iter(claims_of(pod)), "")
    return ""


def lacking(mine: Job, jobs: Iterable[Job], held: Mapping[str, int]) -> str:
    """Describe what a job waits for, and which runs hold it; empty: it does not wait for room."""
    if claim := mine.stuck or (mine.given_back and mine.note and mine.note.claim):
        return f"waits for claim {claim}, which is mounted on another node"
    if mine.trying and not mine.short:
        return ""  # it waits for something else than room
    before = sorted((job for job in jobs if job.age < mine.age and (job.given_back or job.trying)), key=_age)
    others = sorted(run for run in held if run != mine.run)
    by = f"held by {_named('run', others)}" if others else "no run of this namespace holds any"
    after = f"; after {_named('run', [job.run for job in before])}" if before else ""
    return f"waits for {_amounts(mine)}; {by}{after}"


def _amounts(mine: Job) -> str:
    """Describe how much the ranks without a node need."""
    note, number = mine.note, mine.need - (0 if mine.given_back else mine.placed)
    if number <= 0:
        return "a node for its launcher"
    short = note.short if mine.given_back and note is not None else mine.short
    amounts = [_amount(name, mine.ask[name] * number) for name in short if name in mine.ask]
    return " and ".join(amounts) or f"{number} node{'' if number == 1 else 's'}"


def _amount(resource: str, total: Decimal) -> str:
    if resource == "cpu":
        return f"{total.normalize():f} CPU{'' if total == 1 else 's'}"
    if resource == "memory":
        return f"{float(total) / 2**30:.3g} GiB of memory"
    return f"{total.normalize():f} {resource}"


def _named(what: str, names: list[str]) -> str:
    if len(names) > _NAMED:
        names = [*names[:_NAMED], f"{len(names) - _NAMED} more"]
    *first, last = names
    return f"{what}s {', '.join(first)} and {last}" if first else f"{what} {last}"


def _age(job: Job) -> tuple[float, str]:
    return job.age


def _is_multi_attach(event: KubeObject) -> bool:
    return event.get("reason") == "FailedAttachVolume" and "Multi-Attach" in event.get("message", "")


def _requests(spec: KubeObject) -> dict[str, Decimal]:
    totals: dict[str, Decimal] = {}
    for inner in spec["containers"]:
        for name, quantity in inner.get("resources", {}).get("requests", {}).items():
            totals[name] = totals.get(name, Decimal(0)) + amount(quantity)
    return totals


def _place(spec: KubeObject) -> str:
    apart = spec.get("affinity", {}).get("podAntiAffinity", {})
    rule = "requiredDuringSchedulingIgnoredDuringExecution" in apart
    return json.dumps([{name: spec.get(name) for name in _PLACE}, rule], sort_keys=True)


def _scheduled_by_others(pod: KubeObject) -> bool:
    spec, meta = pod["spec"], pod["metadata"]
    marks = {**meta.get("labels", {}), **meta.get("annotations", {})}
    own = spec.get("schedulerName", "default-scheduler") == "default-scheduler"
    return not own or bool(spec.get("schedulingGates")) or any(name in marks for name in _GROUPS)


def _insufficient(words: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({name for text in words for name in _INSUFFICIENT.findall(text)}))
