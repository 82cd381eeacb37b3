"""A snapshot of a job, its pods and its warnings, as the cluster last reported them."""

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from manycpu.pipeline.spec.handle import JobHandle
from manycpu.pipeline.spec.job_kinds import JOB_KINDS, Role
from manycpu.pipeline.spec.kube_object import KubeObject, epoch, is_being_deleted
from manycpu.pipeline.spec.naming import attempt_key, label
from manycpu.pipeline.targets.kubernetes.following.turns import Note, has_given_back, note_of
from manycpu.pipeline.targets.kubernetes.pod_status import Container, containers, scheduled

Params = ParamSpec("Params")
Value = TypeVar("Value")


def remembered(
    read: "Callable[Concatenate[JobSnapshot, Params], Value]",
) -> "Callable[Concatenate[JobSnapshot, Params], Value]":
    """Cache a value derived from a snapshot until the snapshot changes: mostly, only log lines arrive."""

    @wraps(read)
    def cached(snapshot: "JobSnapshot", /, *args: Params.args, **kwargs: Params.kwargs) -> Value:
        key = (read, args, *kwargs.items())
        if key not in snapshot.memory:
            snapshot.memory[key] = read(snapshot, *args, **kwargs)
        value: Value = snapshot.memory[key]
        return value

    return cached


class JobSnapshot:
    """The objects of one job: the job, its pods and the warnings about them.

    Args:
        handle: The job's handle.
        claims: Names of the claims that its pods mount.
    """

    def __init__(self, handle: JobHandle, claims: Iterable[str] = ()) -> None:
        self.job_kind = JOB_KINDS[handle.launch]
        self.kind = self.job_kind.kind
        self.name, self.uid = handle.name, handle.uid
        self._key = (handle.run, str(handle.attempt))
        self._claims = frozenset(claims)
        self.listed_kinds: set[str] = set()
        """The kinds whose objects were listed completely."""
        self.speaker: Role = self.job_kind.speaker
        """Role of the pods whose logs are the ranks' lines: some kinds have a launcher only with MPI."""
        self.note: Note | None = None
        """The note from when the job last gave back its pods; None: it never did."""
        self.memory: dict[Any, Any] = {}
        """The values derived since the last change."""
        self._departed: dict[str, KubeObject] = {}
        self._objects: dict[str, dict[str, KubeObject]] = {}
        self._changed: dict[str, KubeObject] = {}
        self._of_pods: dict[Any, dict[str, tuple[KubeObject, list[KubeObject], Any]]] = {}

    def apply(
        self, kind: str, objects: Iterable[KubeObject], deleted: Iterable[KubeObject], complete: bool
    ) -> bool:
        """Apply a change that a watch reported.

        Args:
            kind: The kind of the objects.
            objects: New or changed objects; if ``complete``, all objects.
            deleted: Deleted objects, in their last state.
            complete: Whether ``objects`` is the complete list of this kind.

        Returns:
            Whether an object of this job has changed, or its kind is listed for the first time.
        """
        mine = {item["metadata"]["uid"]: item for item in objects if self.concerns(kind, item)}
        last = {item["metadata"]["uid"]: item for item in deleted if self.concerns(kind, item)}
        before = self._objects.get(kind, {})
        mine |= {uid: before[uid] for uid, item in mine.items() if _same(before.get(uid), item)}
        after = mine if complete else {uid: o for uid, o in (before | mine).items() if uid not in last}
        self._objects[kind] = after
        if kind == "Pod":
            self._departed |= {uid: last.get(uid, pod) for uid, pod in before.items() if uid not in after}
            self._changed |= {uid: pod for uid, pod in mine.items() if pod is not before.get(uid)}
        self.note = note_of(self.job) or self.note
        if self.job is not None and label(self.job, "speaker") not in ("", self.speaker):
            self.speaker = "launcher"
            self._changed |= self._objects.get("Pod", {})  # their logs are not read yet
        first = complete and kind not in self.listed_kinds
        if complete:
            self.listed_kinds.add(kind)
        changed = first or before != after
        if changed:
            self.memory.clear()
        return changed

    def take_changed(self) -> list[KubeObject]:
        """Return the pods that are new or have changed since the last call."""
        changed, self._changed = self._changed, {}
        return [pod for pod in self.pods if pod["metadata"]["uid"] in changed] if changed else []

    def of_pods(self, read: Callable[[KubeObject, list[KubeObject]], Value]) -> list[Value]:
        """Derive a value from each of :attr:`pods` and its warnings, and cache it until either changes."""
        before, after, warnings = self._of_pods.get(read, {}), {}, self._warnings()
        for pod in self.pods:
            uid = pod["metadata"]["uid"]
            warned, previous = warnings.get(uid, []), before.get(uid)
            same = previous is not None and previous[0] is pod and previous[1] == warned
            after[uid] = previous if previous is not None and same else (pod, warned, read(pod, warned))
        self._of_pods[read] = after
        return [value for _, _, value in after.values()]

    def replace(self, job: KubeObject | None, pods: Iterable[KubeObject]) -> None:
        """Replace the job and all of its pods, after they were read from the API server."""
        self.apply(self.kind, [job] if job else [], [], complete=True)
        self.apply("Pod", pods, [], complete=True)

    def concerns(self, kind: str, item: KubeObject) -> bool:
        """Whether an object belongs to this job."""
        meta = item["metadata"]
        if kind == self.kind:
            return bool(meta["uid"] == self.uid)
        if kind == "Pod":
            return bool(role(item)) and attempt_key(item) == self._key
        about = item.get("involvedObject", {})
        name = about.get("name", "")
        if about.get("kind") == "PersistentVolumeClaim":
            return name in self._claims
        return bool(name == self.name or name.startswith(f"{self.name}-"))

    @property
    def job(self) -> KubeObject | None:
        """The job; None: it is gone."""
        return self._objects.get(self.kind, {}).get(self.uid)

    @property
    @remembered
    def pods(self) -> list[KubeObject]:
        """The job's pods, sorted by name; if several have the same name, only the latest."""
        by_age = sorted(self._objects.get("Pod", {}).values(), key=_born)
        return sorted({pod["metadata"]["name"]: pod for pod in by_age}.values(), key=_name)

    @property
    @remembered
    def events(self) -> list[KubeObject]:
        """Warnings about the job, its pods and its claims since the job was created, the latest last."""
        job = self.job
        since = _born(job) if job else 0.0
        timed = [(event_time(event), event) for event in self._objects.get("Event", {}).values()]
        return [event for time, event in sorted(timed, key=lambda pair: pair[0]) if time >= since]

    def about(self, uid: str) -> list[KubeObject]:
        """List the warnings about one object, the latest last."""
        return self._warnings().get(uid, [])

    @remembered
    def _warnings(self) -> dict[str, list[KubeObject]]:
        by_uid: dict[str, list[KubeObject]] = {}
        for event in self.events:
            by_uid.setdefault(event["involvedObject"].get("uid", ""), []).append(event)
        return by_uid

    @property
    def departed(self) -> dict[str, KubeObject]:
        """Uid -> last state of each pod that is gone, except the pods that a suspension ended."""
        since = max(self.note.at if self.note else 0.0, self.last_transition)
        return {uid: pod for uid, pod in self._departed.items() if _born(pod) >= since}

    @property
    def given_back(self) -> bool:
        """Whether the job has given back its pods and waits for its turn."""
        return self.job is not None and has_given_back(self.job_kind, self.job)

    @property
    def suspended(self) -> bool:
        """Whether the job is suspended, for example until Kueue admits it."""
        return self.job is not None and self.job_kind.suspended(self.job)

    @property
    def suspended_since(self) -> float:
        """Since when the operator reports a suspension, in seconds since the epoch; 0: it reports none."""
        suspended = self.job_kind.condition(self.job, "Suspended")
        return epoch(suspended["lastTransitionTime"]) if suspended else 0.0

    @property
    @remembered
    def last_transition(self) -> float:
        """When the operator last suspended or resumed the job, in seconds since the epoch; 0: never."""
        conditions = ((self.job or {}).get("status") or {}).get("conditions") or ()
        # Also a condition that is no longer true: then its time is that of the resumption.
        times = [epoch(one["lastTransitionTime"]) for one in conditions if one.get("type") == "Suspended"]
        return max(times, default=0.0)

    @property
    def acknowledged(self) -> bool:
        """Whether an operator has noticed the job: by its status, its pods, or a warning about the job."""
        status = (self.job or {}).get("status") or {}
        noticed = [status.get(name) for name in ("conditions", "startTime", "jobsStatus", "state")]
        return bool(any(noticed) or self.pods or self.about(self.uid))

    @property
    @remembered
    def members(self) -> list[KubeObject]:
        """The pods that run ranks."""
        return [pod for pod in self.pods if role(pod) == "rank"]

    @property
    def ranks(self) -> Iterator[Container]:
        """The containers that run ranks, those of deleted pods included, in their last state."""
        pods = [*self.departed.values(), *self.members]
        return (
            container
            for pod in pods
            if role(pod) == "rank"
            for container in containers(pod)
            if not container.init
        )

    @property
    def launchable(self) -> bool:
        """Whether every launcher pod has a node."""
        return all(scheduled(pod) is not None for pod in self.pods if role(pod) == "launcher")

    @remembered
    def capacity(self, nodes: int) -> float | None:
        """Return when this many rank pods had nodes, in seconds since the epoch; None: fewer have nodes.

        Pods that have failed or are being deleted do not count: another pod may replace each of them.
        """
        times = sorted(time for time in self.of_pods(_member_scheduled) if time is not None)
        return times[nodes - 1] if len(times) >= nodes else None


def role(pod: KubeObject) -> str:
    """Return a pod's role in its job: ``launcher`` or ``rank``; empty: it belongs to no job of manycpu."""
    return label(pod, "role")


def event_time(event: KubeObject) -> float:
    """Return when an event was last observed, in seconds since the epoch."""
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    last = next((time for time in times if time), event["metadata"].get("creationTimestamp"))
    return epoch(last)


def _member_scheduled(pod: KubeObject, _: list[KubeObject]) -> float | None:
    """Return when a rank's pod got its node; None: it has none, or it failed or is being deleted."""
    over = is_being_deleted(pod) or (pod.get("status") or {}).get("phase") == "Failed"
    return scheduled(pod) if role(pod) == "rank" and not over else None


def _same(before: KubeObject | None, now: KubeObject) -> bool:
    """Whether an object is unchanged, by its resource version if it has one."""
    if before is None:
        return False
    version = now["metadata"].get("resourceVersion")
    return before == now if version is None else version == before["metadata"].get("resourceVersion")


def _born(item: KubeObject) -> float:
    return epoch(item["metadata"].get("creationTimestamp"))


def _name(item: KubeObject) -> str:
    return str(item["metadata"]["name"])
