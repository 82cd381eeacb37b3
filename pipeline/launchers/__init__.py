"""Launchers describe what to run: one file for each launch kind, and one line here.

A launcher is a module of pure functions, with the fields that it refuses:

- ``objects(run, target, placement) -> list``: what to create or run, the job last.
- ``state(job, pods) -> Status`` and ``ranks(job) -> Ranks``, for jobs: their state, and what the ranks need.
- ``UNSUPPORTED``: field of the run, or ``target.`` and a field of the target, or ``elastic`` for a range of
  nodes -> why this launch kind refuses it. So no field is ignored silently.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from pydantic import BaseModel

from manycpu.pipeline.launchers import mpijob, mpirun, processes, pytorchjob, torchrun, trainjob
from manycpu.pipeline.launchers.pod_spec import TPU, TPU_LABELS, Ranks
from manycpu.pipeline.spec import program
from manycpu.pipeline.spec.errors import Finding
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.spec.placement import Placement
from manycpu.pipeline.spec.state import Status
from manycpu.pipeline.spec.targets import Kubernetes, TargetFields
from manycpu.pipeline.spec.training_run import TrainingRun

__all__ = [
    "JOB_LAUNCHERS",
    "LAUNCHERS",
    "JobLauncher",
    "Launcher",
    "device_refusals",
    "refusals",
]


class Launcher(Protocol):
    """The interface of every launcher module."""

    @property
    def UNSUPPORTED(self) -> Mapping[str, str]:  # noqa: N802 - a constant of the module
        """Field that the launcher refuses -> why."""

    def objects(self, run: TrainingRun, target: Any, placement: Placement) -> list[dict[str, Any]]:
        """Describe what to create or run; the job, or the command, comes last."""


class JobLauncher(Launcher, Protocol):
    """Creates a job on Kubernetes; its facts are in ``spec/job_kinds.py``."""

    def state(self, job: KubeObject | None, pods: Sequence[KubeObject]) -> Status:
        """Derive whether a job has ended, and how, from it and its pods; before, it may count as pending."""

    def ranks(self, job: KubeObject) -> Ranks | None:
        """Read from a job what its ranks need; None: manycpu did not create it."""


LAUNCHERS: Final[dict[str, Launcher]] = {
    "processes": processes,
    "torchrun": torchrun,
    "mpirun": mpirun,
}
JOB_LAUNCHERS: Final[dict[str, JobLauncher]] = {
    "pytorchjob": pytorchjob,
    "mpijob": mpijob,
    "trainjob": trainjob,
}


_NO_LAUNCHER_POD: Final = dict.fromkeys(
    ("resources.launcher_cpu", "resources.launcher_memory"), "no launcher pod starts its ranks"
)


def refusals(run: TrainingRun, target: TargetFields) -> list[Finding]:
    """Return a finding for each field that the user set and that the target's launch kind refuses."""
    launcher: Launcher = {**LAUNCHERS, **JOB_LAUNCHERS}[target.launch]  # both, by launch kind
    reasons = dict(launcher.UNSUPPORTED)
    if not target.has_launcher:
        reasons |= _NO_LAUNCHER_POD
    findings = []
    for field, why in reasons.items():
        message = f"{target.launch!r} cannot do this: {why}"
        if field == "elastic":  # no field of its own: run.nnodes is a range
            if run.elastic:
                findings.append(Finding("run.nnodes", message, "Give one number."))
            continue
        is_of_target = field.startswith("target.")
        name = field if is_of_target else f"run.{field}"
        if _is_set(target if is_of_target else run, name):
            findings.append(Finding(name, message, f"Leave {name} out."))
    return findings


def _is_set(model: BaseModel, field: str) -> bool:
    """Whether the value of a field, such as ``run.resources.cpu``, differs from the default."""
    _, name, *inner = field.split(".")  # _: `run` or `target`, which is the model
    value = getattr(model, name)
    if inner:  # a field of run.resources, whose default is None
        return getattr(value, inner[0]) is not None
    default = type(model).model_fields[name].get_default(call_default_factory=True)
    return bool(value != default)


def device_refusals(run: TrainingRun, target: TargetFields) -> Iterator[Finding]:
    """Yield a finding for each field that contradicts ``run.device``; every launch kind has these rules."""
    if run.downcast_bf16 and (run.device, run.dtype) != ("xla", "bf16"):
        message = f"it is for device xla with dtype bf16, and this is {run.device} with {run.dtype}"
        yield Finding("run.downcast_bf16", message, "Set run.device to 'xla' and run.dtype to 'bf16'")
    if run.device != "xla":
        return
    if run.backend is not None:
        message = f"{run.backend!r} was asked for, and among its devices XLA has collectives of its own"
        yield Finding("run.backend", message, "Leave run.backend out")
    if run.nodes != (1, 1):  # the least and the most, which differ for a range
        message = f"{run.nnodes} nodes were asked for, and device xla divides batches among those of one node"
        yield Finding("run.nnodes", message, "Set run.nnodes to 1; run.nproc_per_node is the devices")
    if program.parse(run.program).kind == "recipe":
        message = f"the recipe {run.program} trains on CPUs alone"
        yield Finding("run.program", message, "Give a script that trains by Accelerate, or run.device cpu")
    if not isinstance(target, Kubernetes):  # on Kubernetes, device xla always means TPUs
        return
    if missing := [label for label in TPU_LABELS if label not in target.node_selector]:
        message = f"pods that ask for {TPU} must say which TPUs, and {' and '.join(missing)} are missing"
        shown = ", ".join(f"{label}: {TPU_LABELS[label]}" for label in missing)
        yield Finding("target.node_selector", message, f"Add them, for example: {shown}")
