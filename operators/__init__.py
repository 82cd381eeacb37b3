"""Airflow operators, one for each verb, and the task group that wires them all."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manycpu.operators.build import BuildImageOperator
    from manycpu.operators.cleanup import CleanupOperator
    from manycpu.operators.export import ExportModelOperator
    from manycpu.operators.params import training_params
    from manycpu.operators.pipeline import TrainingPipeline, training_pipeline
    from manycpu.operators.prepare import PrepareOperator
    from manycpu.operators.report import ReportOperator
    from manycpu.operators.stage import StageDatasetOperator
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

_HOMES = {
    "BuildImageOperator": "build",
    "CleanupOperator": "cleanup",
    "ExportModelOperator": "export",
    "PrepareOperator": "prepare",
    "ReportOperator": "report",
    "StageDatasetOperator": "stage",
    "TrainOperator": "train",
    "TrainingPipeline": "pipeline",
    "training_params": "params",
    "training_pipeline": "pipeline",
}


def __getattr__(name: str) -> Any:
    # Lazy: Airflow asks every installed provider for its metadata, also where no DAG uses it.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
