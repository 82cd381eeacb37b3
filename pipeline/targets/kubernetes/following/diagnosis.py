"""Explain why a job does not run, or how it failed, from its objects. These are pure functions."""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Final, NamedTuple

from manycpu.pipeline.spec.job_kinds import QUEUE_LABEL
from manycpu.pipeline.spec.kube_object import KubeObject, condition, epoch
from manycpu.pipeline.spec.state import describe_exit
from manycpu.pipeline.targets.kubernetes.following.job_snapshot import (
    JobSnapshot,
    cached_until_change,
    role,
)
from manycpu.pipeline.targets.kubernetes.pod_status import Container, PodReason, containers, reasons

_PODS_REFUSED: Final = frozenset(
    {
        *("FailedCreate", "FailedCreatePod"),
        *("TrainJobResourcesCreationFailed", "JobCreationFailed", "HeadlessServiceCreationFailed"),
    }
)
"""Reasons of the events with which operators report that the API server refuses their pods."""
_SIGNAL_BASE: Final = 128  # plus the signal's number: the exit code of a container that a signal ended


class Reason(NamedTuple):
    """One obstacle that keeps a job from running, and the pods that it affects."""

    text: str
    pods: tuple[str, ...] = ()
    fatal: bool = False
    """Whether waiting never removes the obstacle."""

    def __str__(self) -> str:
        return f"{self.text} ({', '.join(self.pods)})" if self.pods else self.text


class Ending(NamedTuple):
    """The failed end of a container."""

    time: float
    """When the container ended, in seconds since the epoch."""
    pod: str
    container: str
    code: int
    """The exit code; negative for a signal."""
    reason: str
    """The kubelet's reason, such as OOMKilled."""
    message: str
    previous: bool
    """Whether the container was restarted after this end, so that its log is the previous one."""
    began: float
    """When the container started, in seconds since the epoch; 0: it never did."""
    hostname: str = ""
    """The host name that the container's processes see."""

    def __str__(self) -> str:
        reason = f" ({self.reason})" if self.reason not in ("", "Error") else ""
        if self.reason == "OOMKilled":
            reason = " (OOMKilled: it used more memory than its limit, see run.resources.memory)"
        message = f": {self.message}" if self.message else ""
        return f"{self.pod}/{self.container} ended with {describe_exit(self.code)}{reason}{message}"


@cached_until_change
def explain(snapshot: JobSnapshot) -> str:
    """Describe what keeps a job from running, its crashes and its lost pods, one line each; may be empty."""
    lines = [*map(str, pending(snapshot)), *crashes(snapshot), *losses(snapshot)]
    return "\n".join(dict.fromkeys(lines))


def fatal_reason(snapshot: JobSnapshot) -> str:
    """Describe the obstacles that waiting never removes, one line each; empty: there are none."""
    return "\n".join(str(reason) for reason in pending(snapshot) if reason.fatal)


@cached_until_change
def pending(snapshot: JobSnapshot) -> list[Reason]:
    """List the reasons why the job or its pods wait; pods with the same reason share an entry."""
    names_by_reason: dict[PodReason, list[str]] = {}
    if not snapshot.suspended:  # of a suspended job, the operator deletes the pods: ignore why they wait
        for pod, reasons_of_pod in zip(snapshot.pods, snapshot.derive_from_pods(reasons), strict=True):
            for reason in reasons_of_pod:
                names_by_reason.setdefault(reason, []).append(pod["metadata"]["name"])
    claim_reasons = [
        Reason(f"claim {event['involvedObject']['name']}: {event['message']}")
        for event in _latest_warnings(snapshot, reasons=None, kind="PersistentVolumeClaim")
    ]
    pod_reasons = [
        # A sidecar that never starts is not fatal: the ranks train without it.
        Reason(reason.text, tuple(names), fatal=reason.fatal and not reason.sidecar)
        for reason, names in names_by_reason.items()
    ]
    return [*_job_reasons(snapshot), *claim_reasons, *pod_reasons]


def _job_reasons(snapshot: JobSnapshot) -> Iterator[Reason]:
    """Yield the reasons why the job itself waits or cannot run, from its state and the warnings about it."""
    job = snapshot.job
    if job is None:
        yield Reason(f"{snapshot.kind} {snapshot.name} is gone: somebody deleted it")
        return
    for event in _latest_warnings(snapshot, {"ValidationError"}, kind=snapshot.job_kind.resource.kind):
        yield Reason(f"the operator refuses the job: {event['message']}", fatal=True)
    if snapshot.given_back:  # it is suspended, so that other jobs can use its nodes (turns.py)
        yield Reason("it holds nothing until there is room for all of its ranks")
        warnings = _latest_warnings(snapshot, {"FailedScheduling"}, kind="Pod")
        messages = [event["message"] for event in warnings]
        # A pod that was deleted while the scheduler bound it says nothing about the nodes.
        about_nodes = [message for message in messages if "is being deleted" not in message]
        if about_nodes:
            yield Reason(f"no node when it last tried: {about_nodes[-1]}")
        return
    if snapshot.suspended:
        queue = job["metadata"].get("labels", {}).get(QUEUE_LABEL)
        until = f", until Kueue's queue {queue} admits it" if queue else ""
        yield Reason(f"it is suspended{until}")
        return
    refused = _latest_warnings(snapshot, _PODS_REFUSED)
    for event in refused:
        yield Reason(f"pods are refused: {event['message']}")
    if snapshot.pods or refused:  # `pending` adds the reasons of the pods
        return
    if not snapshot.acknowledged:
        yield Reason(f"no operator has acknowledged {snapshot.kind} {snapshot.name}")
    elif snapshot.job_kind.end(job) is None:
        yield Reason("it has no pods yet")


@cached_until_change
def crashes(snapshot: JobSnapshot) -> list[str]:
    """Describe, one line each, the restarted containers that crashed; also a launcher that crashes often."""
    lines = [text for texts in snapshot.derive_from_pods(_crashes_of_pod) for text in texts]
    failed = _failed_launchers(snapshot)
    if len(failed) > 1:
        lines.append(
            f"the launcher crashes in a loop: {len(failed)} pods of it have failed ({', '.join(failed)})"
        )
    return lines


def _crashes_of_pod(pod: KubeObject, _warnings: list[KubeObject]) -> list[str]:
    """Describe the last crash of each container of a pod, if the container was restarted after it."""
    return [
        f"started {container.restarts + 1} times: {_ending(container)}"
        for container in containers(pod)
        if container.restarts and _has_failed(container)
    ]


def _has_failed(container: Container) -> bool:
    """Whether the last end of a container was a failure. False for sidecars, and if it never ended."""
    if container.is_sidecar or container.last is None:
        return False
    return bool(container.last.get("exitCode"))


def _failed_launchers(snapshot: JobSnapshot) -> list[str]:
    """List the names of launcher pods that have failed."""
    return [
        str(pod["metadata"]["name"])
        for pod in snapshot.pods
        if role(pod) == "launcher" and pod["status"].get("phase") == "Failed"
    ]


@cached_until_change
def restarts(snapshot: JobSnapshot) -> int:
    """Return the number of restarts of the container, or the launcher, that was restarted most often."""
    # A new pod replaces a launcher that failed: each failed one after the first was a restart.
    launcher_restarts = len(_failed_launchers(snapshot)) - 1
    return max([*snapshot.derive_from_pods(_restarts_of_pod), launcher_restarts, 0])


def _restarts_of_pod(pod: KubeObject, _warnings: list[KubeObject]) -> int:
    """Return the largest number of restarts of any container of a pod; 0: no container was restarted.

    Init containers and sidecars do not count, nor do containers without a known end.
    """
    counted = (c for c in containers(pod) if c.last and not c.init and not c.is_sidecar)
    return max((container.restarts for container in counted), default=0)


@cached_until_change
def losses(snapshot: JobSnapshot) -> list[str]:
    """Describe, one line each, the pods that were evicted, preempted, or lost with their node."""
    present = snapshot.derive_from_pods(_loss_of_pod)
    departed = [_loss_of_pod(pod, []) for pod in snapshot.departed.values()]  # warnings are not used
    return [text for text in dict.fromkeys([*present, *departed]) if text]


def _loss_of_pod(pod: KubeObject, _warnings: list[KubeObject]) -> str:
    """Describe how a pod was evicted, preempted or lost with its node; empty: none of these happened."""
    status, name = pod.get("status", {}), pod["metadata"]["name"]
    if status.get("reason") in ("Evicted", "NodeLost", "Preempting", "Shutdown", "Terminated"):
        return f"pod {name} was lost ({status['reason']}): {status.get('message', '')}"
    if target := condition(pod, "DisruptionTarget"):
        return f"pod {name} was evicted ({target.get('reason')}): {target.get('message', '')}"
    return ""


def endings(snapshot: JobSnapshot) -> list[Ending]:
    """List the last end of each container that failed, also in deleted pods; the earliest end first."""
    pods = [*snapshot.pods, *snapshot.departed.values()]
    failed = {_ending(container) for pod in pods for container in containers(pod) if _has_failed(container)}
    return sorted(failed)  # by time, the first field


def _ending(container: Container) -> Ending:
    """Read the last end of a container, which has ended at least once."""
    last = container.last or {}
    return Ending(
        time=epoch(last.get("finishedAt")),
        pod=container.pod["metadata"]["name"],
        container=container.name,
        code=exit_code(last),
        reason=last.get("reason", ""),
        message=last.get("message", "").strip(),
        previous=container.state("terminated") is None,  # the container has started again, or will
        began=epoch(last.get("startedAt")),
        hostname=container.hostname,
    )


def exit_code(terminated: KubeObject) -> int:
    """Return the exit code in a container's terminated state; -9, for example: signal 9 ended it."""
    code = int(terminated.get("exitCode", 0))
    return _SIGNAL_BASE - code if code > _SIGNAL_BASE else code


def _latest_warnings(
    snapshot: JobSnapshot, reasons: AbstractSet[str] | None, kind: str | None = None
) -> list[KubeObject]:
    """List the last warning of each reason about each object, but each message only once.

    Args:
        snapshot: The job.
        reasons: Only warnings with these reasons; None: all.
        kind: Only warnings about objects of this kind; None: all.
    """
    # The events are sorted by time: later ones replace earlier ones with the same key.
    latest = {
        (event["involvedObject"].get("uid"), event.get("reason")): event
        for event in snapshot.events
        if (reasons is None or event.get("reason") in reasons)
        and kind in (None, event["involvedObject"].get("kind"))
    }
    by_message = {event["message"]: event for event in latest.values()}  # many pods may have the same trouble
    return list(by_message.values())
