"""Decide when a job that cannot place all its pods gives them back, and when it tries again.

To give back its pods, a job is suspended; to try again, it is resumed. This is for jobs that no queue or gang
scheduler admits. Each follower decides for its own job, from the jobs and pods of the namespace. It also acts
for a job whose follower has died, if that job holds what others need.

A job that finds no room gives back its pods at once if an older job waits. If none waits, it keeps its pods
for a minute or two, and then gives them back for a moment: jobs of other namespaces, which are not visible
here, may need the room. The job tries again when no older job waits. After a pause, it also tries if it asks
for less than the older jobs, as it may fit where they do not. All times have jitter, and grow with the number
of tries.
"""

import asyncio
import logging
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from functools import lru_cache
from itertools import takewhile
from typing import Final, NamedTuple

from manycpu.pipeline.adapters.cluster import Cluster, amount
from manycpu.pipeline.adapters.cluster_watch import FAILURES, ClusterWatch
from manycpu.pipeline.launchers import JOB_LAUNCHERS
from manycpu.pipeline.spec.errors import ConflictError, ForbiddenError, NotFoundError, UnauthorizedError
from manycpu.pipeline.spec.job_kinds import JOB_KINDS, QUEUE_LABEL, JobKind
from manycpu.pipeline.spec.kube_object import KubeObject, epoch, is_being_deleted
from manycpu.pipeline.spec.naming import attempt_key, label
from manycpu.pipeline.spec.words import counted, first_of, format_bytes
from manycpu.pipeline.targets.kubernetes.following.job_snapshot import NOTE, JobSnapshot, Note, read_note
from manycpu.pipeline.targets.kubernetes.following.shared_view import RETRY_INTERVAL_S, Selections, SharedView
from manycpu.pipeline.targets.kubernetes.pod_status import claims_of, ended, scheduled_at, unschedulable

_SELECTION: Final = {"labelSelector": "app.kubernetes.io/managed-by=manycpu"}
# The next three times are multiplied by the number of tries, up to _MAX_FACTOR, and by jitter.
_HOLD_S: Final = 90.0  # a job that cannot start keeps its pods for this time if no older job waits
_REST_S: Final = 30.0  # then jobs of other namespaces can take the room for this time
_PAUSE_S: Final = 60.0  # after this time, a job may try again even if an older job waits
_MAX_FACTOR: Final = 6  # without the jitter
_FOLLOWER_TIMEOUT_S: Final = 30.0  # a follower that should act and does not is presumed dead after this time
_CREATION_S: Final = 20.0  # an operator creates all pods within this time, unless a quota refuses them
_START_S: Final = 60.0  # maximum time between the creation of the first and the last pod of one start
_PLACEMENT_FIELDS: Final = ("nodeSelector", "tolerations", "priorityClassName")
_OWN_NODE: Final = "requiredDuringSchedulingIgnoredDuringExecution"  # in a pod's affinity: it shares no node
_INSUFFICIENT: Final = re.compile(r"(?:Insufficient|Too many) ([\w./-]+?)(?=[,. ]|$)")
"""Finds the names of the resources that are short in the scheduler's message."""
_GANG_LABELS: Final = {"scheduling.k8s.io/group-name", "scheduling.x-k8s.io/pod-group"}
_log = logging.getLogger(__name__)


def patch(kind: JobKind, note: Note, version: str) -> KubeObject:
    """Build the patch that writes a job's note, and suspends the job or, if ``note.resumed``, resumes it.

    The API server refuses the patch if the job's resource version is no longer ``version``.
    """
    meta = {"resourceVersion": version, "annotations": {NOTE: note.model_dump_json()}}
    return {"metadata": meta, **kind.with_suspend(not note.resumed)}


class Job(NamedTuple):
    """A job that waits for room or for a claim, and whose pods the default scheduler places."""

    kind: JobKind
    name: str
    uid: str
    resource_version: str
    run: str
    created: float  # seconds since the epoch, as all times
    need: int  # number of rank pods that must have nodes before the job can start
    ask: Mapping[str, Decimal]  # resource -> how much of it each rank pod requests
    node_rules: Sequence[object]  # where pods may run: with equal rules, jobs compete for the same nodes
    claims: tuple[str, ...]
    given_back: Note | None  # the note, while the job has given back its pods
    tries: int  # how often the job has given back its pods
    since: float  # when the job was created or last resumed
    pods: int  # number of its pods that exist, also those that are being deleted
    short: tuple[str, ...]  # resources that are short, or "quota"; empty: there is another obstacle
    claim: str  # a claim that a pod cannot mount, because another node has mounted it; empty: there is none
    placed: int = 0  # number of rank pods that have a node; 0 while the job has given back its pods
    refused: bool = False  # whether it waits for room: the scheduler or a quota refuses one of its pods
    underway: bool = False  # whether a pod was created again, so that training had started

    @property
    def age(self) -> tuple[float, str]:
        """The key by which jobs are sorted, the oldest first."""
        return self.created, self.uid

    def covers(self, other: "Job") -> bool:
        """Whether the other job cannot start while this one cannot.

        True if the other asks for as much or more on the same nodes, or mounts the claim that this one lacks.
        """
        if self.claim:  # this job waits for a claim, not for room
            return self.claim in other.claims
        asks_as_much = all(number <= other.ask.get(resource, 0) for resource, number in self.ask.items())
        return self.node_rules == other.node_rules and self.need <= other.need and asks_as_much


def job_of(
    job: KubeObject, kind: JobKind, pods: Sequence[KubeObject], now: float, stuck_claim: str = ""
) -> Job | None:
    """Summarize a job that waits for room or a claim.

    None: the job takes no turns. It has ended, waits for nothing, or is controlled by a queue, by another
    scheduler or by a person.

    ``stuck_claim``: a claim that a pod of the job cannot mount, because another node has mounted it.
    """
    meta = job["metadata"]
    note = read_note(job)
    ranks = JOB_LAUNCHERS[kind.launch].ranks(job)  # None: manycpu did not create the job
    created = epoch(meta["creationTimestamp"])
    suspended = kind.suspended(job)
    given_back = note if note and suspended and not note.resumed else None
    decided_elsewhere = (
        kind.suspend is None  # this kind of job cannot be suspended
        or QUEUE_LABEL in meta.get("labels", {})
        or any(_has_other_scheduler(pod) for pod in pods)
        or (suspended and given_back is None)  # suspended, but not by manycpu
    )
    if decided_elsewhere or ranks is None or is_being_deleted(job) or kind.end(job) is not None:
        return None
    requests = ranks.pod["containers"][0].get("resources", {}).get("requests", {})
    summary = Job(
        kind=kind,
        name=meta["name"],
        uid=meta["uid"],
        resource_version=meta.get("resourceVersion", ""),
        run=label(job, "run"),
        created=created,
        need=ranks.nodes,
        ask={name: amount(quantity) for name, quantity in requests.items()},
        node_rules=[*map(ranks.pod.get, _PLACEMENT_FIELDS), _OWN_NODE in str(ranks.pod.get("affinity"))],
        claims=claims_of({"spec": ranks.pod}),
        given_back=given_back,
        tries=note.tries if note else 0,
        since=max(created, note.resumed if note else 0.0),
        pods=len(pods),
        short=given_back.short if given_back else (),
        claim=given_back.claim if given_back else stuck_claim,
    )
    if given_back:  # its pods are deleted, and the note says what they waited for
        return summary
    return _with_pods(summary, pods, now)


def _with_pods(job: Job, pods: Sequence[KubeObject], now: float) -> Job | None:
    """Return the job with what its pods wait for; None: they wait for nothing that other jobs may hold."""
    ranks = [pod for pod in pods if label(pod, "role") == "rank"]
    placed = sum(scheduled_at(pod) is not None and pod["status"].get("phase") != "Failed" for pod in ranks)
    launcher_waits = any(label(pod, "role") == "launcher" and scheduled_at(pod) is None for pod in pods)
    lacks_node = placed < job.need or launcher_waits
    creation_times = [epoch(pod["metadata"]["creationTimestamp"]) for pod in pods] or [now]
    # If an operator has not created all pods some seconds after the first one, a quota refuses the others.
    over_quota = 0 < len(ranks) < job.need and now - min(creation_times) > _CREATION_S
    messages = [text for pod in pods if (text := unschedulable(pod)) is not None]
    short = ["quota"] if over_quota else sorted({*_INSUFFICIENT.findall("\n".join(messages))})
    refused = lacks_node and bool(messages or over_quota)  # else the scheduler has not decided yet
    fits_nowhere = refused and not short and not placed  # such as with a selector that fits no node
    # A job that has no pods some seconds after its start waits for its operator, and not for room.
    may_have_pods = bool(pods) or now - job.since < _CREATION_S
    waits_for_room = lacks_node and may_have_pods and not fits_nowhere
    if not waits_for_room and not job.claim:
        return None
    # A pod that was created much later replaces another one: the job had started.
    underway = max(creation_times) - min(creation_times) > _START_S
    return job._replace(placed=placed, refused=refused, short=tuple(short), underway=underway)


def _has_other_scheduler(pod: KubeObject) -> bool:
    """Whether another scheduler, a scheduling gate or a group of pods decides when a pod gets its node."""
    spec, meta = pod["spec"], pod["metadata"]
    marks = {*meta.get("labels", {}), *meta.get("annotations", {})}
    scheduler = spec.get("schedulerName", "default-scheduler")
    return scheduler != "default-scheduler" or bool(spec.get("schedulingGates") or marks & _GANG_LABELS)


class Turns:
    """Decides which jobs of a namespace give back their pods or resume, for all followers in this process."""

    def __init__(self) -> None:
        self._waiting: list[Job] = []  # the oldest first, without those whose followers are presumed dead
        # For each pod with a node: its run, and the claims that it mounts.
        self._holders: set[tuple[str, tuple[str, ...]]] = set()
        # Uid and resource version of each job whose follower should act -> since when it should.
        self._due_since: dict[tuple[str, str], float] = {}
        # Jobs of dead followers that should give back their pods, each with the note for that.
        self._abandoned: list[tuple[Job, Note]] = []

    def update(self, objects: Mapping[str, Iterable[KubeObject]], now: float) -> None:
        """Read all jobs and pods of a namespace, once for all followers; find the jobs of dead followers."""
        pods = [pod for pod in objects.get("Pod", ()) if scheduled_at(pod) is not None and not ended(pod)]
        self._holders = {(label(pod, "run"), claims_of(pod)) for pod in pods if label(pod, "role")}
        self._waiting = sorted(_read_jobs(objects, now), key=lambda job: job.age)
        # What each follower should do for its job now; other followers leave a started training alone.
        due = {
            (job.uid, job.resource_version): (job, note)
            for job in self._waiting
            if not job.underway and (note := self._next_note(job, now)) is not None
        }
        # When a follower acts, the resource version changes, and the key is a new one.
        self._due_since = {key: self._due_since.get(key, now) for key in due}
        late = [due[key] for key, since in self._due_since.items() if now - since > _FOLLOWER_TIMEOUT_S]
        # Resuming the job of a dead follower would help no other job.
        self._abandoned = [(job, note) for job, note in late if not note.resumed]
        unattended = {job.uid for job, _ in late}
        self._waiting = [job for job in self._waiting if job.uid not in unattended]

    def decide(self, mine: Job, now: float) -> tuple[Job, Note] | None:
        """Return the job to patch, ``mine`` or one whose follower is dead, and its new note; None: no job."""
        for job, note in self._abandoned:  # these come first, as they hold what others need
            if job.uid != mine.uid:
                return job, note
        own = self._next_note(mine, now)
        return None if own is None else (mine, own)

    def _ahead(self, job: Job) -> Iterator[Job]:
        """Yield the older jobs that wait for room, or for a claim that this job mounts; the oldest first."""
        older = takewhile(lambda other: other.age < job.age, self._waiting)  # the oldest come first
        return (other for other in older if not other.claim or other.claim in job.claims)

    def _next_note(self, job: Job, now: float) -> Note | None:
        """Return the note with which a job gives back its pods or resumes now; None: leave it as it is."""
        older_waits = next(self._ahead(job), None) is not None
        claim_is_held = bool(job.claim) and any(
            job.claim in claims for run, claims in self._holders if run != job.run
        )
        note = job.given_back
        if note is None:
            return _note_to_give_back(job, now, older_waits=older_waits, claim_is_held=claim_is_held)
        may_try_from = note.due if older_waits or claim_is_held else note.rests
        if now < may_try_from or job.pods:  # pods that still exist are being deleted: wait for that
            return None
        # Let an older job go first if it is getting nodes, or if it fits wherever this one fits.
        if any(other.placed or other.covers(job) for other in self._ahead(job)):
            return None
        return note.model_copy(update={"resumed": now})

    def waits_for(self, mine: Job) -> str:
        """Describe the room or the claim that a job waits for; empty: it waits for something else.

        For room, the text says how much is lacking, which runs have nodes, and which older runs wait.
        """
        if mine.claim:
            return f"waits for claim {mine.claim}, which is mounted on another node"
        if not mine.given_back and not mine.short:
            return ""
        lacking = mine.need - mine.placed
        if lacking > 0:
            short = [name for name in mine.short if name in mine.ask]  # without "quota"
            amounts = [_format_amount(name, mine.ask[name] * lacking) for name in short]
            room = " and ".join(amounts) or counted(lacking, "node")
        else:
            room = "a node for its launcher"
        holders = sorted({run for run, _ in self._holders} - {mine.run})
        held_by = f"held by run {first_of(holders)}" if holders else "no run of this namespace holds any"
        older_runs = [job.run for job in self._ahead(mine)]
        after = f"; after run {first_of(older_runs)}" if older_runs else ""
        return f"waits for {room}; {held_by}{after}"


def _note_to_give_back(job: Job, now: float, *, older_waits: bool, claim_is_held: bool) -> Note | None:
    """Return the note with which a job gives back its pods now; None: it keeps them.

    Args:
        job: The job.
        now: Seconds since the epoch.
        older_waits: Whether an older job waits for room, or for a claim that this job mounts.
        claim_is_held: Whether pods of another run mount the claim that this job waits for.
    """
    # Seeded, so that each call for this try gets the same times.
    jitter = random.Random(f"{job.uid}/{job.tries}").uniform(0.5, 1.5)  # noqa: S311 - no secret
    factor = min(job.tries + 1, _MAX_FACTOR) * jitter
    if job.claim:
        gives_back = claim_is_held
    else:
        has_waited = now - job.since > _HOLD_S * factor
        holds_in_vain = bool(job.placed and job.short) and has_waited
        gives_back = job.refused and (older_waits or holds_in_vain)
    if not gives_back:
        return None
    # If no run of this namespace is known to need the room, leave it to other namespaces for a while.
    rests_until = now if older_waits or claim_is_held else now + _REST_S * factor
    return Note(
        at=now,
        tries=job.tries + 1,
        short=job.short,
        claim=job.claim,
        rests=rests_until,
        due=now + _PAUSE_S * factor,
    )


def _read_jobs(objects: Mapping[str, Iterable[KubeObject]], now: float) -> Iterator[Job]:
    """Yield the jobs that wait for room or a claim; leave out, and log once, a job that cannot be read."""
    pods = defaultdict[tuple[str, str], list[KubeObject]](list)
    for pod in objects.get("Pod", ()):
        if label(pod, "role"):
            pods[attempt_key(pod)].append(pod)
    for kind in JOB_KINDS.values():
        for item in objects.get(kind.kind, ()):
            try:
                # Without `stuck_claim`: only the job's own follower reads the events that show it.
                job = job_of(item, kind, pods[attempt_key(item)], now)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                _log_once(item["metadata"]["uid"], f"{kind.kind} {item['metadata']['name']}", repr(error))
            else:
                if job is not None:
                    yield job


@lru_cache
def _log_once(_uid: str, name: str, why: str) -> None:
    """Log, once for each uid, that a job cannot be read: another version or a person may have written it."""
    _log.warning("%s is left out of the turns, it cannot be read: %s", name, why)


def _format_amount(resource: str, total: Decimal) -> str:
    """Write an amount of a resource for people: memory is in bytes, cpu in cores."""
    if resource == "memory":
        return f"{format_bytes(float(total))} of memory"
    return counted(float(total), "CPU") if resource == "cpu" else f"{total.normalize():f} {resource}"


class _AllJobs(SharedView):
    """All jobs of manycpu in a namespace and their pods, watched while a follower needs them."""

    def __init__(self, watch: ClusterWatch, cluster: Cluster) -> None:
        super().__init__(watch, cluster)
        self._turns = Turns()
        # Number of changes, and time in units of RETRY_INTERVAL_S, at the last update of the turns.
        self._last_update = (-1, 0.0)

    def selections(self) -> Selections:
        """Select pods, and those kinds of jobs that the cluster serves and this account may list."""
        kinds = ["Pod"]
        for kind in (kind.kind for kind in JOB_KINDS.values()):
            with suppress(ForbiddenError, NotFoundError):
                # A trial: watch the kind only if this call succeeds.
                self._cluster.call("GET", self._cluster.path(kind), query={"limit": "1"})
                kinds.append(kind)
        return dict.fromkeys(kinds, _SELECTION)

    def turns(self, now: float) -> Turns:
        """Return the turns, which all followers share; first update them after a change or some seconds."""
        present = (self.changes, now // RETRY_INTERVAL_S)  # the second number changes every few seconds
        if present != self._last_update:
            self._last_update = present
            self._turns.update(self.objects(), now)
        return self._turns


class TurnTaking:
    """Suspends one job while there is no room for it, and resumes it in its turn.

    While the job waits, ``wake`` is called when other jobs have changed, and after each patch.
    """

    def __init__(
        self, snapshot: JobSnapshot, cluster: Cluster, watch: ClusterWatch, wake: Callable[[], None]
    ) -> None:
        self._snapshot, self._cluster, self._watch, self._wake = snapshot, cluster, watch, wake
        self.waits = False  # whether the job waits, so that the other jobs are watched
        self._patching: asyncio.Task[None] | None = None
        self._patched = ""  # resource version that was patched last: wait until the watch shows a later one
        self._trouble = ""  # why the last patch failed; empty: it did not fail

    def take_turn(self, *, met: bool, now: float) -> str:
        """Suspend or resume the job if its turn has come, or a job whose follower is dead.

        Returns what the job waits for; empty: nothing, or it is unknown. A job whose ranks have ``met`` keeps
        its pods, and takes no turn.
        """
        snapshot = self._snapshot
        mine = None
        # After the ranks have met, skip this, as this function is called for each batch of their lines.
        if snapshot.job is not None and (snapshot.given_back or not met):
            mine = job_of(
                snapshot.job,
                snapshot.job_kind,
                snapshot.pods,
                now,
                stuck_claim=snapshot.claim_mounted_elsewhere,
            )
        self.waits = mine is not None and bool(mine.given_back or mine.refused or mine.claim)
        shared_view = _AllJobs.of(self._watch, self._cluster)
        if mine is None or not self.waits:
            shared_view.leave(self._wake)
            return ""
        shared_view.join(self._wake)
        if not shared_view.is_complete:  # decide only when all other jobs are known
            return ""
        turns = shared_view.turns(now)
        decision = turns.decide(mine, now)
        is_idle = self._patching is None or self._patching.done()
        if decision is not None and is_idle:
            job, note = decision
            if job.resource_version != self._patched:  # else the watch does not show the last patch yet
                self._patched = job.resource_version
                self._patching = asyncio.create_task(self._patch(job, note))
        return "\n".join(filter(None, [turns.waits_for(mine), self._trouble]))

    async def _patch(self, job: Job, note: Note) -> None:
        """Send the patch that suspends or resumes a job; if that fails, keep the reason in ``_trouble``."""
        try:
            change = patch(job.kind, note, job.resource_version)
            await asyncio.to_thread(self._cluster.patch, job.kind.kind, job.name, change)
            self._trouble = ""
        except (NotFoundError, ConflictError):  # the job is gone, or has changed: decide again
            self._trouble = ""
            self._patched = ""
        except FAILURES as error:
            self._trouble = f"its turn cannot be taken: {error}"
            # Without the right to patch, do not try again until the job changes.
            if not isinstance(error, (UnauthorizedError, ForbiddenError)):
                self._patched = ""
        self._wake()

    def close(self) -> None:
        """Stop watching; a patch that was already sent may still take effect: the next follower sees it."""
        _AllJobs.of(self._watch, self._cluster).leave(self._wake)
        if self._patching is not None:
            self._patching.cancel()
