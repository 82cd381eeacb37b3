"""A snapshot of a job, its pods and its warnings, as the cluster last reported them."""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from pydantic import BaseModel, ValidationError

from manycpu.pipeline.spec.handle import JobHandle
from manycpu.pipeline.spec.job_kinds import JOB_KINDS, Role
from manycpu.pipeline.spec.kube_object import KubeObject, epoch, is_being_deleted
from manycpu.pipeline.spec.naming import attempt_key, label
from manycpu.pipeline.targets.kubernetes.pod_status import Container, claims_of, containers, scheduled_at

NOTE: Final = "manycpu/given-back"
"""The annotation that has a job's note, a :class:`Note` as JSON."""
_STATUS_OF_OPERATOR: Final = ("conditions", "startTime", "jobsStatus", "state")
"""Fields of a job's status that operators write; ``jobsStatus`` is of a TrainJob, ``state`` has a phase."""
Params = ParamSpec("Params")
Value = TypeVar("Value")


class Note(BaseModel):
    """The annotation of a job that was suspended, and so gave back its pods and its nodes to other jobs.

    Times are seconds since the epoch.
    """

    at: float
    """When the job gave back its pods."""
    tries: int = 1
    """How often the job has given back its pods."""
    short: tuple[str, ...] = ()
    """Resources that were short, such as ``cpu``; empty: there was another obstacle."""
    claim: str = ""
    """The claim that the job's pods could not mount, because another run's pods had it; empty: none."""
    rests: float = 0.0
    """From when on the job may try again if no older job waits."""
    due: float = 0.0
    """From when on the job may try again even if older jobs wait: it may fit where these do not."""
    resumed: float = 0.0
    """When the job tried again; 0: it has not."""


def read_note(job: KubeObject | None) -> Note | None:
    """Read the note in a job's annotation; None: there is none, or it cannot be read."""
    text = ((job or {}).get("metadata", {}).get("annotations") or {}).get(NOTE)
    try:
        return Note.model_validate_json(text) if text else None
    except ValidationError:  # written by another version, or by a person
        return None


def cached_until_change(
    read: "Callable[Concatenate[JobSnapshot, Params], Value]",
) -> "Callable[Concatenate[JobSnapshot, Params], Value]":
    """Decorate a function of a snapshot, so that its result is cached until the snapshot changes.

    A follower calls such functions for each batch of log lines; the snapshot changes far less often.
    """

    @wraps(read)
    def cached(snapshot: "JobSnapshot", /, *args: Params.args, **kwargs: Params.kwargs) -> Value:
        key = (read, args, *kwargs.items())
        if key not in snapshot.memory:  # `apply` clears it after a change
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
        """Role of the pods whose logs have the ranks' lines; a TrainJob has a launcher only with MPI."""
        self.note: Note | None = None
        """The note of the last time that the job gave back its pods; None: it never did."""
        self.memory: dict[Any, Any] = {}
        """The cache of :func:`cached_until_change`: function and arguments -> value."""
        self._departed: dict[str, KubeObject] = {}
        """Uid -> last state of each pod that is gone."""
        self._objects: dict[str, dict[str, KubeObject]] = {}
        """Kind -> uid -> object."""
        self._changed: dict[str, KubeObject] = {}
        """Uid -> pod, for the pods that have changed since the last :meth:`take_changed`."""
        self._of_pods: dict[Any, dict[str, tuple[KubeObject, list[KubeObject], Any]]] = {}
        """Function -> uid of a pod -> the pod, its warnings, and the value derived from them."""

    def apply(
        self, kind: str, objects: Iterable[KubeObject], deleted: Iterable[KubeObject], complete: bool
    ) -> bool:
        """Apply a change that a watch reported. If it changes anything here, clear the cached values.

        Args:
            kind: The kind of the objects.
            objects: New or changed objects; if ``complete``, all objects.
            deleted: Deleted objects, in their last state.
            complete: Whether ``objects`` is the complete list of this kind.

        Returns:
            Whether an object of this job has changed, or its kind is listed for the first time.
        """
        if kind == "Event":  # an event may lack these two fields
            objects = [{"reason": "", "message": "", **event} for event in objects]
        before = self._objects.get(kind, {})  # uid -> object of this job; so is `after`
        received = {item["metadata"]["uid"]: item for item in objects if self.is_about_job(kind, item)}
        removed = {item["metadata"]["uid"]: item for item in deleted if self.is_about_job(kind, item)}
        for uid, item in received.items():
            if uid in before and _is_unchanged(before[uid], item):
                received[uid] = before[uid]  # the same Python object: values derived from it stay cached
        if complete:
            after = received
        else:
            after = {uid: item for uid, item in (before | received).items() if uid not in removed}
        self._objects[kind] = after
        if kind == "Pod":
            # The last state of a pod that is gone: the one that the watch reported with the deletion. If a
            # complete list just lacks the pod, it is the state before.
            self._departed |= {uid: removed.get(uid, pod) for uid, pod in before.items() if uid not in after}
            self._changed |= {uid: pod for uid, pod in received.items() if pod is not before.get(uid)}
        elif kind == self.kind:
            self._read_job()
        is_first_list = complete and kind not in self.listed_kinds
        if complete:
            self.listed_kinds.add(kind)
        changed = is_first_list or before != after
        if changed:
            self.memory.clear()
        return changed

    def _read_job(self) -> None:
        """Read the note of the job, and its label that says which pods print the ranks' lines."""
        self.note = read_note(self.job) or self.note  # the last note stays when the job is gone
        # Without the label, `speaker` stays that of the job's kind.
        if self.job is not None and label(self.job, "speaker") not in ("", self.speaker):
            self.speaker = "launcher"  # this job has a launcher, unlike others of its kind
            self._changed |= self._objects.get("Pod", {})  # so that the launcher's log is read now

    def take_changed(self) -> list[KubeObject]:
        """Return the pods that are new or have changed since the last call."""
        if not self._changed:
            return []
        changed, self._changed = self._changed, {}
        return [pod for pod in self.pods if pod["metadata"]["uid"] in changed]

    def derive_from_pods(self, read: Callable[[KubeObject, list[KubeObject]], Value]) -> list[Value]:
        """Call ``read`` with each of :attr:`pods` and its warnings; return the values, in the pods' order.

        The value for a pod is cached until the pod or its warnings change.
        """
        cached_by_uid = self._of_pods.get(read, {})
        present_by_uid: dict[str, tuple[KubeObject, list[KubeObject], Value]] = {}
        for pod in self.pods:
            uid = pod["metadata"]["uid"]
            warnings = self.warnings_about(uid)
            cached = cached_by_uid.get(uid)  # the pod, its warnings, and the value
            # `apply` keeps the Python object of a pod that has not changed.
            if cached is not None and cached[0] is pod and cached[1] == warnings:
                present_by_uid[uid] = cached
            else:
                present_by_uid[uid] = (pod, warnings, read(pod, warnings))
        self._of_pods[read] = present_by_uid  # drops the values of pods that are gone
        return [value for _, _, value in present_by_uid.values()]

    def replace(self, job: KubeObject | None, pods: Iterable[KubeObject]) -> None:
        """Replace the job and all of its pods, after they were read from the API server."""
        self.apply(self.kind, [job] if job else [], deleted=[], complete=True)
        self.apply("Pod", pods, deleted=[], complete=True)

    def is_about_job(self, kind: str, item: KubeObject) -> bool:
        """Whether an object is the job, one of its pods, or an event about it, its pods or its claims."""
        meta = item["metadata"]
        if kind == self.kind:
            return bool(meta["uid"] == self.uid)
        if kind == "Pod":
            return bool(role(item)) and attempt_key(item) == self._key
        about = item.get("involvedObject", {})
        name = about.get("name", "")
        if about.get("kind") == "PersistentVolumeClaim":
            return name in self._claims
        # An event has no labels of its object: pods are recognized by their names.
        is_named_as_pod = name.startswith(f"{self.name}-")
        return bool(name == self.name or is_named_as_pod)

    @property
    def job(self) -> KubeObject | None:
        """The job; None: it is gone."""
        return self._objects.get(self.kind, {}).get(self.uid)

    @property
    @cached_until_change
    def pods(self) -> list[KubeObject]:
        """The job's pods, sorted by name; if several have the same name, only the latest."""
        oldest_first = sorted(self._objects.get("Pod", {}).values(), key=_creation_time)
        # A later pod of the same name replaces the earlier one here.
        latest_by_name = {str(pod["metadata"]["name"]): pod for pod in oldest_first}
        return [latest_by_name[name] for name in sorted(latest_by_name)]

    @property
    @cached_until_change
    def events(self) -> list[KubeObject]:
        """Warnings about the job, its pods and its claims since the job was created, the latest last."""
        job = self.job
        # Older events are about an earlier object of the same name, or an earlier use of a claim.
        since = _creation_time(job) if job else 0.0
        events = sorted(self._objects.get("Event", {}).values(), key=event_time)
        return [event for event in events if event_time(event) >= since]

    def warnings_about(self, uid: str) -> list[KubeObject]:
        """List the warnings about one object, the latest last."""
        return self._warnings_by_uid().get(uid, [])

    @cached_until_change
    def _warnings_by_uid(self) -> dict[str, list[KubeObject]]:
        """Group the warnings by the uid of the object that they are about."""
        by_uid: dict[str, list[KubeObject]] = {}
        for event in self.events:
            by_uid.setdefault(event["involvedObject"].get("uid", ""), []).append(event)
        return by_uid

    @property
    def departed(self) -> dict[str, KubeObject]:
        """Uid -> last state, for each pod that is gone, except the pods that a suspension ended."""
        # When the job was last suspended or resumed. The suspension ended all pods that are older.
        suspended_at = max(self.note.at if self.note else 0.0, self.last_transition)
        return {uid: pod for uid, pod in self._departed.items() if _creation_time(pod) >= suspended_at}

    @property
    def given_back(self) -> bool:
        """Whether the job has given back its pods and waits for its turn."""
        note = read_note(self.job)
        return self.suspended and note is not None and not note.resumed

    @property
    def suspended(self) -> bool:
        """Whether the job is suspended, for example until Kueue admits it."""
        return self.job is not None and self.job_kind.suspended(self.job)

    @property
    def suspended_since(self) -> float:
        """When the operator says that a suspension began, in seconds since the epoch; 0: it reports none."""
        suspended = self.job_kind.condition(self.job, "Suspended")
        return epoch(suspended["lastTransitionTime"]) if suspended else 0.0

    @property
    @cached_until_change
    def last_transition(self) -> float:
        """When the operator last suspended or resumed the job, in seconds since the epoch; 0: never."""
        conditions = ((self.job or {}).get("status") or {}).get("conditions") or ()
        # A condition that is no longer true counts too: its time is that of the resumption.
        suspended = [condition for condition in conditions if condition.get("type") == "Suspended"]
        times = [epoch(condition["lastTransitionTime"]) for condition in suspended]
        return max(times, default=0.0)

    @property
    def acknowledged(self) -> bool:
        """Whether an operator has noticed the job: the job has a status or pods, or a warning is about it."""
        status = (self.job or {}).get("status") or {}
        has_status = any(status.get(name) for name in _STATUS_OF_OPERATOR)
        return bool(has_status or self.pods or self.warnings_about(self.uid))

    @property
    def rank_containers(self) -> list[Container]:
        """The containers of the ranks' pods, without init containers; those of deleted pods come first."""
        pods = [pod for pod in (*self.departed.values(), *self.pods) if role(pod) == "rank"]
        return [container for pod in pods for container in containers(pod) if not container.init]

    @property
    def claim_mounted_elsewhere(self) -> str:
        """Name of the claim that a pod cannot mount, because another node has mounted it; empty: none."""
        for pod in self.pods:
            started = any(
                container.state("running") or container.state("terminated") for container in containers(pod)
            )
            warnings = self.warnings_about(pod["metadata"]["uid"])
            messages = [event["message"] for event in warnings if event["reason"] == "FailedAttachVolume"]
            # Kubernetes writes "Multi-Attach" if another node has a volume that only one node can mount.
            if not started and any("Multi-Attach" in message for message in messages):
                return next(iter(claims_of(pod)), "")
        return ""

    @property
    def launchers_have_nodes(self) -> bool:
        """Whether every launcher pod has a node."""
        return all(scheduled_at(pod) is not None for pod in self.pods if role(pod) == "launcher")

    @cached_until_change
    def placed_at(self, nodes: int) -> float | None:
        """Return when ``nodes`` rank pods had a node, in seconds since the epoch; None: fewer have one now.

        Pods that have failed or are being deleted do not count, because other pods may replace them.
        """
        times = sorted(time for time in self.derive_from_pods(_rank_scheduled) if time is not None)
        return times[nodes - 1] if len(times) >= nodes else None


def role(pod: KubeObject) -> str:
    """Return a pod's role in its job: ``launcher`` or ``rank``; empty: it belongs to no job of manycpu."""
    return label(pod, "role")


def event_time(event: KubeObject) -> float:
    """Return when an event was last observed, in seconds since the epoch."""
    # Kubernetes has two APIs of events, which fill different fields. The latest of these times comes first.
    series = event.get("series") or {}
    return epoch(
        series.get("lastObservedTime")
        or event.get("lastTimestamp")
        or event.get("eventTime")
        or event["metadata"].get("creationTimestamp")
    )


def _rank_scheduled(pod: KubeObject, _: list[KubeObject]) -> float | None:
    """Return when a rank's pod got its node; None: it has none, is no rank's, failed or is being deleted."""
    if role(pod) != "rank" or is_being_deleted(pod) or (pod.get("status") or {}).get("phase") == "Failed":
        return None
    return scheduled_at(pod)


def _is_unchanged(before: KubeObject, now: KubeObject) -> bool:
    """Whether an object is unchanged; resource versions are compared if there are any, else all fields."""
    version = now["metadata"].get("resourceVersion")
    if version is None:
        return before == now
    return bool(version == before["metadata"].get("resourceVersion"))


def _creation_time(item: KubeObject) -> float:
    """Return when an object was created, in seconds since the epoch."""
    return epoch(item["metadata"].get("creationTimestamp"))
