"""Stage, build, launch, wait, export, clean up: the verbs of a training run, without Airflow."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manycpu.pipeline.notebook.launch import launch, notebook_launcher
    from manycpu.pipeline.spec.errors import ManycpuError
    from manycpu.pipeline.spec.targets import BareMetal, Kubernetes, Local, Target
    from manycpu.pipeline.spec.training_run import Resources, TrainingRun
    from manycpu.pipeline.verbs.all_verbs import train

__all__ = [
    "BareMetal",
    "Kubernetes",
    "Local",
    "ManycpuError",
    "Resources",
    "Target",
    "TrainingRun",
    "launch",
    "notebook_launcher",
    "train",
]

_HOMES = {
    "BareMetal": "spec.targets",
    "Kubernetes": "spec.targets",
    "Local": "spec.targets",
    "ManycpuError": "spec.errors",
    "Resources": "spec.training_run",
    "Target": "spec.targets",
    "TrainingRun": "spec.training_run",
    "launch": "notebook.launch",
    "notebook_launcher": "notebook.launch",
    "train": "verbs.all_verbs",
}


def __getattr__(name: str) -> Any:
    # Lazy: a training process imports manycpu.pipeline.node and must not pay for the verbs.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
