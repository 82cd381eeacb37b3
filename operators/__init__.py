"""Airflow operators, one for each step of a run, and the task group that wires them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manycpu.operators.params import training_params
    from manycpu.operators.pipeline import TrainingPipeline, training_pipeline
    from manycpu.operators.steps import (
        BuildImageOperator,
        CleanupOperator,
        ExportModelOperator,
        PrepareOperator,
        ReportOperator,
        StageDatasetOperator,
    )
    from manycpu.operators.train import TrainOperator

__all__ = [
    "BuildImageOperator",
    "CleanupOperator",
    "ExportModelOperator",
    "PrepareOperator",
    "ReportOperator",
    "StageDatasetOperator",
    "TrainOperator",
    "TrainingPipeline",
    "training_params",
    "training_pipeline",
]

_MODULES = dict.fromkeys(__all__, "steps") | {
    "TrainOperator": "train",
    "TrainingPipeline": "pipeline",
    "training_params": "params",
    "training_pipeline": "pipeline",
}


def __getattr__(name: str) -> Any:
    # Lazy: Airflow imports this package to read the provider's metadata, even if no DAG uses it.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
