"""Read the state of a pod: its containers, whether it has a node, how it ended, why it does not start."""

import re
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, Literal, NamedTuple

from manycpu.pipeline.spec.kube_object import KubeObject, condition, epoch

_NEVER: Final = frozenset({"InvalidImageName", "ErrImageNeverPull"})
"""Reasons why a container waits that never pass by themselves."""
_IMAGE: Final = frozenset({*_NEVER, "ErrImagePull", "ImagePullBackOff", "ImageInspectError"})
_STUCK: Final = frozenset({*_IMAGE, "CreateContainerConfigError", "CreateContainerError"})
"""Reasons why a container waits that seldom pass by themselves."""
_VOLUME: Final = frozenset({"FailedMount", "FailedAttachVolume", "FailedMapVolume"})
_BEING_MADE: Final = frozenset({"ContainerCreating", "PodInitializing", ""})
_NO_SECRET: Final = re.compile(r'secret "([^"]+)" not found')


class PodReason(NamedTuple):
    """A reason why a pod does not run."""

    text: str
    waiting: str = ""
    """The kubelet's reason why a container waits, such as ImagePullBackOff; empty if the cause is another."""

    @property
    def fatal(self) -> bool:
        """Whether the reason never passes by itself."""
        return self.waiting in _NEVER

    @property
    def stuck(self) -> bool:
        """Whether the reason seldom passes by itself."""
        return self.waiting in _STUCK

    @property
    def missing_secret(self) -> str:
        """The name of the secret that a container waits for; empty if it waits for something else."""
        match = _NO_SECRET.search(self.text) if self.waiting == "CreateContainerConfigError" else None
        return match[1] if match else ""


class Container(NamedTuple):
    """A container of a pod, with its status."""

    pod: KubeObject
    name: str
    init: bool
    status: KubeObject

    @property
    def hostname(self) -> str:
        """The host name that its processes see."""
        return str(self.pod["spec"].get("hostname") or self.pod["metadata"]["name"])

    @property
    def restarts(self) -> int:
        """How often the kubelet has restarted it."""
        return int(self.status.get("restartCount", 0))

    def state(self, kind: Literal["waiting", "running", "terminated"]) -> KubeObject | None:
        """Return its present state if it is of this kind, else None."""
        state: KubeObject | None = self.status.get("state", {}).get(kind)
        return state

    @property
    def last(self) -> KubeObject | None:
        """How it ended last: now, or before its latest restart; None: it has not ended."""
        before: KubeObject | None = self.status.get("lastState", {}).get("terminated")
        return self.state("terminated") or before


def containers(pod: KubeObject) -> Iterator[Container]:
    """List the containers of a pod, init containers first, in the order of its spec."""
    status = pod.get("status", {})
    for init, group, statuses in (
        (True, "initContainers", "initContainerStatuses"),
        (False, "containers", "containerStatuses"),
    ):
        by_name = {status["name"]: status for status in status.get(statuses) or ()}
        for spec in pod["spec"].get(group) or ():
            yield Container(pod, spec["name"], init, by_name.get(spec["name"], {}))


def scheduled(pod: KubeObject) -> float | None:
    """Read when a pod got its node, in seconds since the epoch; None: it has no node."""
    placed = condition(pod, "PodScheduled")
    return epoch(placed["lastTransitionTime"]) if placed else None


def ended(pod: KubeObject) -> bool:
    """Whether a pod has ended; a pod whose node was lost counts as ended."""
    status = pod.get("status", {})
    return status.get("phase") in ("Succeeded", "Failed") or status.get("reason") == "NodeLost"


def unschedulable(pod: KubeObject) -> str | None:
    """Read the scheduler's message why a pod has no node; None: the pod has one, or there is no message."""
    placed = _scheduling(pod)
    refused = placed.get("status") == "False" and placed.get("reason") == "Unschedulable"
    return str(placed.get("message", "")) if refused else None


def claims_of(pod: KubeObject) -> tuple[str, ...]:
    """List the claims that a pod mounts."""
    volumes = pod["spec"].get("volumes") or ()
    return tuple(v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v)


def reasons(pod: KubeObject, warnings: Sequence[KubeObject] = ()) -> list[PodReason]:
    """List the reasons why a pod does not run; empty if it runs or has ended.

    Args:
        pod: The pod.
        warnings: The known warning events about it: they have details.
    """
    if ended(pod):
        return []
    if scheduled(pod) is None:
        return [PodReason(_unscheduled(pod))]
    pod_reasons = []
    for container in containers(pod):
        waiting = (container.state("waiting") or {}).get("reason", "")
        if waiting not in _BEING_MADE:
            pod_reasons.append(PodReason(_waiting(container, warnings), waiting))
    if not pod_reasons and (text := _being_made(pod, warnings)):
        pod_reasons.append(PodReason(text))
    return pod_reasons


def _scheduling(pod: KubeObject) -> KubeObject:
    conditions = pod.get("status", {}).get("conditions") or ()
    return next((c for c in conditions if c["type"] == "PodScheduled"), {})


def _unscheduled(pod: KubeObject) -> str:
    if message := _scheduling(pod).get("message"):
        return f"no node: {message}"
    claims = claims_of(pod)
    wants = f", which needs the volume of {', '.join(claims)}" if claims else ""
    return f"no node: the scheduler has not placed it yet{wants}"


def _waiting(container: Container, warnings: Sequence[KubeObject]) -> str:
    waiting = container.state("waiting") or {}
    reason, message = waiting.get("reason", ""), waiting.get("message", "")
    what = f"{'init container' if container.init else 'container'} {container.name}"
    if reason in _IMAGE:
        specs = [*(container.pod["spec"].get("initContainers") or ()), *container.pod["spec"]["containers"]]
        image = next(spec.get("image") for spec in specs if spec["name"] == container.name)
        messages = [e["message"] for e in _among(warnings, {"Failed"}) if str(image) in e["message"]]
        return f"image {image} of {what} cannot be pulled ({reason}): {messages[-1] if messages else message}"
    if reason == "CrashLoopBackOff":
        return f"{what} crashes in a loop"
    return f"{what} cannot start ({reason}): {message}"


def _being_made(pod: KubeObject, warnings: Sequence[KubeObject]) -> str:
    """Describe what delays the start of a pod that has a node; empty if its containers have started."""
    troubles = _among(warnings, _VOLUME)
    waits = [c for c in containers(pod) if not c.state("running") and not c.state("terminated")]
    if not waits:
        return ""
    if troubles:
        return f"volume: {troubles[-1]['message']}"
    if sandbox := _among(warnings, {"FailedCreatePodSandBox"}):
        return f"no sandbox: {sandbox[-1]['message']}"
    running = next((c for c in containers(pod) if c.init and c.state("running")), None)
    if running is not None:
        return f"init container {running.name} has not finished"
    return "its containers are being made: images are pulled, volumes mounted"


def _among(warnings: Sequence[KubeObject], reasons: AbstractSet[str]) -> list[KubeObject]:
    return [event for event in warnings if event.get("reason") in reasons]
