"""Why a job does not go on, or how it failed: read off what the cluster says of it. Pure."""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Final, NamedTuple

from manycpu.pipeline.spec.state import describe_exit
from manycpu.pipeline.verbs.on_kubernetes.gang import (
    Container,
    Gang,
    Manifest,
    condition,
    containers,
    ended,
    epoch,
    role,
    scheduled,
)

__all__ = ["Ending", "Reason", "crashes", "endings", "explain", "hopeless", "losses", "pending", "restarts"]

_IMAGE: Final = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
)
NEVER: Final = frozenset({"InvalidImageName", "ErrImageNeverPull"})
"""Why a container waits, where no waiting mends it."""
_VOLUME: Final = frozenset({"FailedMount", "FailedAttachVolume", "FailedMapVolume"})
_REFUSED: Final = frozenset({"FailedCreate", "FailedCreatePod"})
_BEING_MADE: Final = frozenset({"ContainerCreating", "PodInitializing", ""})
_QUEUE: Final = "kueue.x-k8s.io/queue-name"
_SIGNALS: Final = 128  # a container's exit code above this is a signal's number plus this


class Reason(NamedTuple):
    """One thing that keeps a job from running, and the pods that it concerns."""

    text: str
    pods: tuple[str, ...] = ()
    fatal: bool = False
    """Whether it will never pass by itself."""

    def __str__(self) -> str:
        return f"{self.text} ({', '.join(self.pods)})" if self.pods else self.text


class Ending(NamedTuple):
    """How a container ended other than well."""

    time: float
    """Seconds since the epoch."""
    pod: str
    container: str
    code: int
    """Negative for a signal."""
    reason: str
    """In the kubelet's words, such as OOMKilled."""
    message: str
    previous: bool
    """Whether it was started again since: its log is the previous one."""
    began: float
    """Seconds since the epoch; 0 where it never did."""

    def __str__(self) -> str:
        memory = ": it used more memory than its limit" if self.reason == "OOMKilled" else ""
        word = f" ({self.reason}{memory})" if self.reason not in ("", "Error") else ""
        said = f": {self.message}" if self.message else ""
        return f"{self.pod}/{self.container} ended with {describe_exit(self.code)}{word}{said}"


def explain(gang: Gang) -> str:
    """Say in one message what keeps a job from running, a line for each reason; empty where nothing does."""
    found = [*map(str, pending(gang)), *crashes(gang), *losses(gang)]
    return "\n".join(dict.fromkeys(found))


def hopeless(gang: Gang) -> str:
    """Say what will never pass by itself; empty where nothing is like that."""
    return "\n".join(str(reason) for reason in pending(gang) if reason.fatal)


def pending(gang: Gang) -> list[Reason]:
    """List what the job, or any pod of it, waits for; pods with the same reason stand together."""
    found: dict[tuple[str, bool], list[str]] = {}
    for pod in () if gang.given_back else gang.pods:
        for text, fatal in _of_pod(gang, pod):
            found.setdefault((text, fatal), []).append(pod["metadata"]["name"])
    pods = [Reason(text, tuple(names), fatal) for (text, fatal), names in found.items()]
    return [*_of_job(gang), *_of_claims(gang), *pods]


def _of_job(gang: Gang) -> Iterator[Reason]:
    job = gang.job
    if job is None:
        yield Reason(f"{gang.kind} {gang.name} is gone: somebody deleted it")
        return
    for event in _latest(gang, {"ValidationError"}, gang.kind):
        yield Reason(f"the operator refuses the job: {event['message']}", fatal=True)
    if gang.given_back:
        yield Reason("it holds nothing until there is room for all of its ranks")
        return
    if gang.suspended:
        queue = job["metadata"].get("labels", {}).get(_QUEUE)
        yield Reason(
            f"it is suspended, until Kueue's queue {queue} admits it" if queue else "it is suspended"
        )
        return
    refused = list(_latest(gang, _REFUSED))
    for event in refused:
        yield Reason(f"pods are refused: {event['message']}")
    if gang.pods or refused:
        return
    if not gang.acknowledged:
        yield Reason(f"no operator has acknowledged {gang.kind} {gang.name}")
    elif not any(condition(job, kind) for kind in ("Succeeded", "Failed")):
        yield Reason("it has no pods yet")


def _of_claims(gang: Gang) -> Iterator[Reason]:
    for event in _latest(gang, None, "PersistentVolumeClaim"):
        yield Reason(f"claim {event['involvedObject']['name']}: {event['message']}")


def _of_pod(gang: Gang, pod: Manifest) -> Iterator[tuple[str, bool]]:
    if ended(pod):
        return
    if scheduled(pod) is None:
        yield _unscheduled(pod), False
        return
    all_told = False
    for container in containers(pod):
        waiting = container.state("waiting")
        if waiting is None:
            continue
        reason = waiting.get("reason", "")
        if reason not in _BEING_MADE:
            yield _waiting(gang, container, reason, waiting.get("message", "")), reason in NEVER
            all_told = True
    if not all_told and (text := _being_made(gang, pod)):
        yield text, False


def _unscheduled(pod: Manifest) -> str:
    conditions = pod.get("status", {}).get("conditions") or ()
    found: Manifest = next((c for c in conditions if c["type"] == "PodScheduled"), {})
    if found.get("message"):
        return f"no node: {found['message']}"
    volumes = pod["spec"].get("volumes") or ()
    claims = [v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v]
    wants = f", which needs the volume of {', '.join(claims)}" if claims else ""
    return f"no node: the scheduler has not placed it yet{wants}"


def _waiting(gang: Gang, container: Container, reason: str, message: str) -> str:
    what = f"{'init container' if container.init else 'container'} {container.name}"
    if reason in _IMAGE:
        specs = [*container.pod["spec"].get("initContainers", ()), *container.pod["spec"]["containers"]]
        image = next(spec.get("image") for spec in specs if spec["name"] == container.name)
        told = [e["message"] for e in _about(gang, container.pod, {"Failed"}) if str(image) in e["message"]]
        return f"image {image} of {what} cannot be pulled ({reason}): {told[-1] if told else message}"
    if reason == "CrashLoopBackOff":
        return f"{what} crashes in a loop"
    return f"{what} cannot start ({reason}): {message}"


def _being_made(gang: Gang, pod: Manifest) -> str:
    """Say what holds up a pod that has a node; empty where its containers run."""
    troubles = _about(gang, pod, _VOLUME)
    waits = [c for c in containers(pod) if not c.state("running") and not c.state("terminated")]
    if not waits:
        return ""
    if troubles:
        return f"volume: {troubles[-1]['message']}"
    if sandbox := _about(gang, pod, {"FailedCreatePodSandBox"}):
        return f"no sandbox: {sandbox[-1]['message']}"
    running = next((c for c in containers(pod) if c.init and c.state("running")), None)
    if running is not None:
        return f"init container {running.name} has not finished"
    return "its containers are being made: images are pulled, volumes mounted"


def crashes(gang: Gang) -> list[str]:
    """Say which containers crash in a loop, whatever the job says of itself; launchers included."""
    found = []
    for pod in gang.pods:
        for container in containers(pod):
            if container.restarts and container.last and container.last.get("exitCode"):
                times = f"started {container.restarts + 1} times"
                found.append(f"{times}: {_ending(container)}")
    failed = [pod for pod in gang.pods if role(pod) == "launcher" and pod["status"].get("phase") == "Failed"]
    if len(failed) > 1:
        names = ", ".join(pod["metadata"]["name"] for pod in failed)
        found.append(f"the launcher crashes in a loop: {len(failed)} pods of it have failed ({names})")
    return found


def restarts(gang: Gang) -> int:
    """Count how often a container of the gang crashed and was started again, at most of any one."""
    counts = [c.restarts for pod in gang.pods for c in containers(pod) if not c.init and c.last]
    failed = [p for p in gang.pods if role(p) == "launcher" and p["status"].get("phase") == "Failed"]
    return max([*counts, len(failed) - 1, 0])


def losses(gang: Gang) -> list[str]:
    """Say which pods were evicted, preempted, or lost with their node."""
    found = []
    for pod in [*gang.pods, *gang.departed.values()]:
        status, name = pod.get("status", {}), pod["metadata"]["name"]
        target = condition(pod, "DisruptionTarget")
        if status.get("reason") in ("Evicted", "NodeLost", "Preempting", "Shutdown", "Terminated"):
            found.append(f"pod {name} was lost ({status['reason']}): {status.get('message', '')}")
        elif target is not None:
            found.append(f"pod {name} was evicted ({target.get('reason')}): {target.get('message', '')}")
    return list(dict.fromkeys(found))


def endings(gang: Gang) -> list[Ending]:
    """List the containers that ended other than well, the first to end first."""
    pods = [*gang.pods, *gang.departed.values()]
    found = [_ending(c) for pod in pods for c in containers(pod) if c.last and c.last.get("exitCode")]
    return sorted(set(found))


def _ending(container: Container) -> Ending:
    last = container.last or {}
    code = int(last.get("exitCode", 0))
    return Ending(
        time=epoch(last.get("finishedAt")),
        pod=container.pod["metadata"]["name"],
        container=container.name,
        code=_SIGNALS - code if code > _SIGNALS else code,
        reason=last.get("reason", ""),
        message=last.get("message", "").strip(),
        previous=container.state("terminated") is None,
        began=epoch(last.get("startedAt")),
    )


def _about(gang: Gang, pod: Manifest, reasons: AbstractSet[str]) -> list[Manifest]:
    uid = pod["metadata"]["uid"]
    return [e for e in gang.events if e.get("reason") in reasons and e["involvedObject"].get("uid") == uid]


def _latest(gang: Gang, reasons: AbstractSet[str] | None, kind: str | None = None) -> Iterator[Manifest]:
    """List the warnings for these reasons, about objects of this kind: of each object the last."""
    found = {
        (event["involvedObject"].get("uid"), event.get("reason")): event
        for event in gang.events
        if (reasons is None or event.get("reason") in reasons)
        and kind in (None, event["involvedObject"].get("kind"))
    }
    yield from {event["message"]: event for event in found.values()}.values()
