"""Processes on this machine: a parent that imports no torch starts the ranks, and ends them together."""

from typing import Any

from manycpu.pipeline.launchers.environment import arguments, environment
from manycpu.pipeline.spec.placement import Placement
from manycpu.pipeline.spec.targets import Local
from manycpu.pipeline.spec.training_run import TrainingRun

UNSUPPORTED = {
    "env_from": "secrets by name exist on Kubernetes only; set them where the worker starts",
    "resources.memory": "the memory of processes cannot be limited",
    "max_restarts": "its ranks are not restarted; target.launch 'torchrun' does that",
}


def objects(run: TrainingRun, target: Local, placement: Placement) -> list[dict[str, Any]]:  # noqa: ARG001
    """Return one command, ``{argv, env, cwd, files}``, whose process starts the ranks."""
    argv = [
        placement.python,
        "-m",
        "manycpu.pipeline.node",
        f"--nproc-per-node={run.processes}",
        *placement.program,
        *arguments(run, placement),
    ]
    return [{"argv": argv, "env": environment(run, placement), "cwd": placement.code, "files": {}}]
