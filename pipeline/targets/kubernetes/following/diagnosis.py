"""Explain why a job does not run, or how it failed, from its objects. Pure."""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Final, NamedTuple

from manycpu.pipeline.spec.job_kinds import QUEUE_LABEL
from manycpu.pipeline.spec.kube_object import KubeObject, condition, epoch
from manycpu.pipeline.spec.state import describe_exit
from manycpu.pipeline.targets.kubernetes.following.job_snapshot import (
    JobSnapshot,
    remembered,
    role,
)
from manycpu.pipeline.targets.kubernetes.pod_status import Container, PodReason, containers, reasons

_REFUSED: Final = frozenset(
    {
        *("FailedCreate", "FailedCreatePod"),
        *("TrainJobResourcesCreationFailed", "JobCreationFailed", "HeadlessServiceCreationFailed"),
    }
)
_SIGNALS: Final = 128  # if a signal ends a container, its exit code is this plus the signal's number


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
    """Whether the container was restarted since, so that this log is the previous one."""
    began: float
    """When the container started, in seconds since the epoch; 0: it never did."""
    hostname: str = ""
    """The host name that its processes see."""

    def __str__(self) -> str:
        limit = ": it used more memory than its limit, see run.resources.memory"
        memory = limit if self.reason == "OOMKilled" else ""
        word = f" ({self.reason}{memory})" if self.reason not in ("", "Error") else ""
        message = f": {self.message}" if self.message else ""
        return f"{self.pod}/{self.container} ended with {describe_exit(self.code)}{word}{message}"


@remembered
def explain(snapshot: JobSnapshot) -> str:
    """Explain what keeps a job from running, one line for each reason; empty: nothing does."""
    lines = [*map(str, pending(snapshot)), *crashes(snapshot), *losses(snapshot)]
    return "\n".join(dict.fromkeys(lines))


def hopeless(snapshot: JobSnapshot) -> str:
    """Describe the obstacles that waiting never removes; empty: there are none."""
    return "\n".join(str(reason) for reason in pending(snapshot) if reason.fatal)


@remembered
def pending(snapshot: JobSnapshot) -> list[Reason]:
    """List the reasons why the job or its pods wait; pods with the same reason are grouped."""
    pods_by_reason: dict[PodReason, list[str]] = {}
    waiting = () if snapshot.suspended else zip(snapshot.pods, snapshot.of_pods(reasons), strict=True)
    for pod, of_pod in waiting:
        for reason in of_pod:
            pods_by_reason.setdefault(reason, []).append(pod["metadata"]["name"])
    pods = [Reason(reason.text, tuple(names), reason.fatal) for reason, names in pods_by_reason.items()]
    return [*_of_job(snapshot), *_of_claims(snapshot), *pods]


def _of_job(snapshot: JobSnapshot) -> Iterator[Reason]:
    job = snapshot.job
    if job is None:
        yield Reason(f"{snapshot.kind} {snapshot.name} is gone: somebody deleted it")
        return
    for event in _latest(snapshot, {"ValidationError"}, snapshot.job_kind.resource.kind):
        yield Reason(f"the operator refuses the job: {event['message']}", fatal=True)
    if snapshot.given_back:
        yield Reason("it holds nothing until there is room for all of its ranks")
        tries = _latest(snapshot, {"FailedScheduling"}, "Pod")
        # A pod that was deleted while the scheduler bound it says nothing about the nodes.
        for event in [event for event in tries if "is being deleted" not in event["message"]][-1:]:
            yield Reason(f"no node when it last tried: {event['message']}")
        return
    if snapshot.suspended:
        queue = job["metadata"].get("labels", {}).get(QUEUE_LABEL)
        yield Reason(
            f"it is suspended, until Kueue's queue {queue} admits it" if queue else "it is suspended"
        )
        return
    refused = list(_latest(snapshot, _REFUSED))
    for event in refused:
        yield Reason(f"pods are refused: {event['message']}")
    if snapshot.pods or refused:
        return
    if not snapshot.acknowledged:
        yield Reason(f"no operator has acknowledged {snapshot.kind} {snapshot.name}")
    elif snapshot.job_kind.end(job) is None:
        yield Reason("it has no pods yet")


def _of_claims(snapshot: JobSnapshot) -> Iterator[Reason]:
    for event in _latest(snapshot, None, "PersistentVolumeClaim"):
        yield Reason(f"claim {event['involvedObject']['name']}: {event['message']}")


@remembered
def crashes(snapshot: JobSnapshot) -> list[str]:
    """List the containers that were restarted after a crash, and a launcher that failed several times."""
    lines = [text for texts in snapshot.of_pods(_crashes_of) for text in texts]
    failed = _failed_launchers(snapshot)
    if len(failed) > 1:
        lines.append(
            f"the launcher crashes in a loop: {len(failed)} pods of it have failed ({', '.join(failed)})"
        )
    return lines


def _crashes_of(pod: KubeObject, _: list[KubeObject]) -> list[str]:
    crashed = [
        container
        for container in containers(pod)
        if container.restarts and container.last and container.last.get("exitCode")
    ]
    return [f"started {container.restarts + 1} times: {_ending(container)}" for container in crashed]


def _failed_launchers(snapshot: JobSnapshot) -> list[str]:
    return [name for name in snapshot.of_pods(_failed_launcher) if name]


def _failed_launcher(pod: KubeObject, _: list[KubeObject]) -> str:
    failed = role(pod) == "launcher" and pod["status"].get("phase") == "Failed"
    return str(pod["metadata"]["name"]) if failed else ""


@remembered
def restarts(snapshot: JobSnapshot) -> int:
    """Return the number of restarts of the container, or the launcher, that was restarted most often."""
    return max([*snapshot.of_pods(_restarts_of), len(_failed_launchers(snapshot)) - 1, 0])


def _restarts_of(pod: KubeObject, _: list[KubeObject]) -> int:
    return max((c.restarts for c in containers(pod) if not c.init and c.last), default=0)


@remembered
def losses(snapshot: JobSnapshot) -> list[str]:
    """List the pods that were evicted, preempted, or lost with their node."""
    gone = [_loss_of(pod, []) for pod in snapshot.departed.values()]
    return [text for text in dict.fromkeys([*snapshot.of_pods(_loss_of), *gone]) if text]


def _loss_of(pod: KubeObject, _: list[KubeObject]) -> str:
    status, name = pod.get("status", {}), pod["metadata"]["name"]
    if status.get("reason") in ("Evicted", "NodeLost", "Preempting", "Shutdown", "Terminated"):
        return f"pod {name} was lost ({status['reason']}): {status.get('message', '')}"
    if target := condition(pod, "DisruptionTarget"):
        return f"pod {name} was evicted ({target.get('reason')}): {target.get('message', '')}"
    return ""


def endings(snapshot: JobSnapshot) -> list[Ending]:
    """List the containers that failed, those of deleted pods included, the earliest end first."""
    pods = [*snapshot.pods, *snapshot.departed.values()]
    ended = [_ending(c) for pod in pods for c in containers(pod) if c.last and c.last.get("exitCode")]
    return sorted(set(ended))


def _ending(container: Container) -> Ending:
    last = container.last or {}
    return Ending(
        time=epoch(last.get("finishedAt")),
        pod=container.pod["metadata"]["name"],
        container=container.name,
        code=exit_code(last),
        reason=last.get("reason", ""),
        message=last.get("message", "").strip(),
        previous=container.state("terminated") is None,
        began=epoch(last.get("startedAt")),
        hostname=container.hostname,
    )


def exit_code(terminated: KubeObject) -> int:
    """Return a container's exit code, negative for a signal."""
    code = int(terminated.get("exitCode", 0))
    return _SIGNALS - code if code > _SIGNALS else code


def _latest(
    snapshot: JobSnapshot, reasons: AbstractSet[str] | None, kind: str | None = None
) -> Iterator[KubeObject]:
    """Yield the last warning for each of these reasons about each object of this kind; None: all."""
    latest = {
        (event["involvedObject"].get("uid"), event.get("reason")): event
        for event in snapshot.events
        if (reasons is None or event.get("reason") in reasons)
        and kind in (None, event["involvedObject"].get("kind"))
    }
    yield from {event["message"]: event for event in latest.values()}.values()
