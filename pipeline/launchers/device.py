"""What a run on XLA's devices may not ask for, whatever its launch kind."""

from collections.abc import Iterator

from manycpu.pipeline.launchers.pod_spec import TPU, TPU_LABELS
from manycpu.pipeline.spec import program
from manycpu.pipeline.spec.errors import Finding
from manycpu.pipeline.spec.targets import Kubernetes, TargetFields
from manycpu.pipeline.spec.training_run import TrainingRun

__all__ = ["device_refusals"]


def device_refusals(run: TrainingRun, target: TargetFields) -> Iterator[Finding]:
    """Yield the fields that contradict ``run.device``."""
    if run.downcast_bf16 and (run.device, run.dtype) != ("xla", "bf16"):
        message = f"it is for device xla with dtype bf16, and this is {run.device} with {run.dtype}"
        yield Finding("run.downcast_bf16", message, "Set run.device to 'xla' and run.dtype to 'bf16'")
    if run.device == "xla":
        yield from _of_xla(run)
        yield from _of_nodes(target)


def _of_xla(run: TrainingRun) -> Iterator[Finding]:
    if run.backend is not None:
        message = f"{run.backend!r} was asked for, and among its devices XLA has collectives of its own"
        yield Finding("run.backend", message, "Leave run.backend out")
    if run.nodes != (1, 1):
        message = f"{run.nnodes} nodes were asked for, and device xla divides batches among those of one node"
        yield Finding("run.nnodes", message, "Set run.nnodes to 1; run.nproc_per_node is the devices")
    if program.parse(run.program).kind == "recipe":
        message = f"the recipe {run.program} trains on CPUs alone"
        yield Finding("run.program", message, "Give a script that trains by Accelerate, or run.device cpu")


def _of_nodes(target: TargetFields) -> Iterator[Finding]:
    if not isinstance(target, Kubernetes):
        return
    if missing := [label for label in TPU_LABELS if label not in target.node_selector]:
        message = f"pods that ask for {TPU} must say which TPUs, and {' and '.join(missing)} are missing"
        shown = ", ".join(f"{label}: {TPU_LABELS[label]}" for label in missing)
        yield Finding("target.node_selector", message, f"Add them, for example: {shown}")
