"""Read the state of a pod: its containers, whether it has a node, how it ended, why it does not start."""

import re
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, Literal, NamedTuple

from manycpu.pipeline.spec.job_kinds import JOB_KINDS
from manycpu.pipeline.spec.kube_object import KubeObject, condition, epoch

_FATAL_REASONS: Final = frozenset({"InvalidImageName", "ErrImageNeverPull"})
"""The kubelet's reasons why a container waits: these never pass by themselves."""
_IMAGE_REASONS: Final = frozenset({*_FATAL_REASONS, "ErrImagePull", "ImagePullBackOff", "ImageInspectError"})
"""Reasons why a container waits for its image."""
_STUCK_REASONS: Final = frozenset({*_IMAGE_REASONS, "CreateContainerConfigError", "CreateContainerError"})
"""Reasons why a container waits: these seldom pass by themselves."""
_VOLUME_WARNINGS: Final = frozenset({"FailedMount", "FailedAttachVolume", "FailedMapVolume"})
_PASSING_REASONS: Final = frozenset({"ContainerCreating", "PodInitializing", ""})
"""Reasons why a container waits: these pass by themselves. Empty: it does not wait, or gives no reason."""
_NO_SECRET: Final = re.compile(r'secret "([^"]+)" not found')


class PodReason(NamedTuple):
    """A reason why a pod does not run."""

    text: str
    waiting: str = ""
    """The kubelet's reason why a container waits, such as ImagePullBackOff; empty: no container waits."""
    sidecar: bool = False
    """In a pod of a job: whether the container that waits is a sidecar."""

    @property
    def fatal(self) -> bool:
        """Whether the reason never passes by itself."""
        return self.waiting in _FATAL_REASONS

    @property
    def stuck(self) -> bool:
        """Whether the reason seldom passes by itself."""
        return self.waiting in _STUCK_REASONS

    @property
    def missing_secret(self) -> str:
        """The name of the secret that a container waits for; empty if it waits for something else."""
        if self.waiting != "CreateContainerConfigError":
            return ""
        match = _NO_SECRET.search(self.text)
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
    def is_sidecar(self) -> bool:
        """In a pod of a job: whether a webhook added this container, so that it says nothing of the ranks."""
        return not self.init and all(self.name not in kind.containers for kind in JOB_KINDS.values())

    @property
    def restarts(self) -> int:
        """How often the kubelet has restarted this container."""
        return int(self.status.get("restartCount", 0))

    def state(self, kind: Literal["waiting", "running", "terminated"]) -> KubeObject | None:
        """Return the details of the container's state, such as its reason; None: it is in another state."""
        state: KubeObject | None = self.status.get("state", {}).get(kind)
        return state

    @property
    def last(self) -> KubeObject | None:
        """Details of its last end: now, or before its latest restart; None: it has never ended."""
        before_restart: KubeObject | None = self.status.get("lastState", {}).get("terminated")
        return self.state("terminated") or before_restart


def containers(pod: KubeObject) -> Iterator[Container]:
    """Yield the containers of a pod, init containers first, in the order of its spec."""
    pod_status = pod.get("status", {})
    for spec_field, status_field, init in (
        ("initContainers", "initContainerStatuses", True),
        ("containers", "containerStatuses", False),
    ):
        status_by_name = {status["name"]: status for status in pod_status.get(status_field) or ()}
        for spec in pod["spec"].get(spec_field) or ():
            yield Container(pod, spec["name"], init, status=status_by_name.get(spec["name"], {}))


def scheduled_at(pod: KubeObject) -> float | None:
    """Return when a pod got its node, in seconds since the epoch; None: it has no node."""
    true_condition = condition(pod, "PodScheduled")  # None: the condition is false, or missing
    return epoch(true_condition["lastTransitionTime"]) if true_condition else None


def ended(pod: KubeObject) -> bool:
    """Whether a pod has ended; a pod whose node was lost counts as ended."""
    status = pod.get("status", {})
    return status.get("phase") in ("Succeeded", "Failed") or status.get("reason") == "NodeLost"


def unschedulable(pod: KubeObject) -> str | None:
    """Read the scheduler's message why no node fits a pod; None: the scheduler has not said so."""
    scheduling = _scheduling_condition(pod)
    if scheduling.get("status") == "False" and scheduling.get("reason") == "Unschedulable":
        return str(scheduling.get("message", ""))
    return None


def claims_of(pod: KubeObject) -> tuple[str, ...]:
    """List the claims that a pod mounts."""
    volumes = pod["spec"].get("volumes") or ()
    return tuple(
        volume["persistentVolumeClaim"]["claimName"]
        for volume in volumes
        if "persistentVolumeClaim" in volume
    )


def reasons(pod: KubeObject, warnings: Sequence[KubeObject] = ()) -> list[PodReason]:
    """List the reasons why a pod does not run; empty if it runs or has ended.

    Args:
        pod: The pod.
        warnings: The known warning events about the pod, the latest last; its status lacks their details.
    """
    if ended(pod):
        return []
    if scheduled_at(pod) is None:
        return [PodReason(_describe_missing_node(pod))]
    pod_reasons = []
    for container in containers(pod):
        waiting = (container.state("waiting") or {}).get("reason", "")
        if waiting not in _PASSING_REASONS:
            pod_reasons.append(
                PodReason(_describe_waiting(container, warnings), waiting, container.is_sidecar)
            )
    # The status says no more than that containers are being made: only the warnings show what delays them.
    if not pod_reasons and (text := _describe_delay(pod, warnings)):
        pod_reasons.append(PodReason(text))
    return pod_reasons


def _scheduling_condition(pod: KubeObject) -> KubeObject:
    """Return a pod's condition PodScheduled, true or not; empty: it has none yet."""
    conditions = pod.get("status", {}).get("conditions") or ()
    return next((condition for condition in conditions if condition["type"] == "PodScheduled"), {})


def _describe_missing_node(pod: KubeObject) -> str:
    """Describe why a pod has no node."""
    if message := _scheduling_condition(pod).get("message"):
        return f"no node: {message}"
    claims = claims_of(pod)
    needs_volume = f", which needs the volume of {', '.join(claims)}" if claims else ""
    return f"no node: the scheduler has not placed it yet{needs_volume}"


def _describe_waiting(container: Container, warnings: Sequence[KubeObject]) -> str:
    """Describe why a container waits; for an image, with the details that only the warnings have."""
    waiting = container.state("waiting") or {}
    reason, message = waiting.get("reason", ""), waiting.get("message", "")
    subject = f"{'init container' if container.init else 'container'} {container.name}"
    if reason in _IMAGE_REASONS:
        specs = [*(container.pod["spec"].get("initContainers") or ()), *container.pod["spec"]["containers"]]
        image = next(spec.get("image") for spec in specs if spec["name"] == container.name)
        failures = [event.get("message", "") for event in _with_reason(warnings, {"Failed"})]
        failures_of_image = [text for text in failures if str(image) in text]  # not of other images
        detail = failures_of_image[-1] if failures_of_image else message
        return f"image {image} of {subject} cannot be pulled ({reason}): {detail}"
    if reason == "CrashLoopBackOff":
        return f"{subject} crashes in a loop"
    return f"{subject} cannot start ({reason}): {message}"


def _describe_delay(pod: KubeObject, warnings: Sequence[KubeObject]) -> str:
    """Describe what delays the start of a pod that has a node; empty if its containers have started."""
    if all(container.state("running") or container.state("terminated") for container in containers(pod)):
        return ""
    if volume_warnings := _with_reason(warnings, _VOLUME_WARNINGS):
        return f"volume: {volume_warnings[-1]['message']}"
    if sandbox_warnings := _with_reason(warnings, {"FailedCreatePodSandBox"}):
        return f"no sandbox: {sandbox_warnings[-1]['message']}"
    for container in containers(pod):
        if container.init and container.state("running"):
            return f"init container {container.name} has not finished"
    return "its containers are being made: images are pulled, volumes mounted"


def _with_reason(warnings: Sequence[KubeObject], reasons: AbstractSet[str]) -> list[KubeObject]:
    """Return the warnings with one of these reasons, in their order: the latest is the last."""
    return [event for event in warnings if event.get("reason") in reasons]
