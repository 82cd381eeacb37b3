"""All steps of a run as one task group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
from airflow.sdk import TaskGroup

from manycpu.operators.base import fields_of
from manycpu.operators.steps import (
    BuildImageOperator,
    CleanupOperator,
    ExportModelOperator,
    PrepareOperator,
    ReportOperator,
    StageDatasetOperator,
)
from manycpu.operators.train import RETRY_DELAY, TrainOperator

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow.sdk import Asset, XComArg

    from manycpu.pipeline import Target, TrainingRun


@attrs.define(repr=False)
class TrainingPipeline(TaskGroup):
    """The task group that :func:`training_pipeline` makes, to wire other tasks before and after it."""

    output: XComArg = attrs.field(init=False)
    """Where the model is: ``path``, ``files``, ``bytes``, ``sha256`` and ``metrics``."""
    report: XComArg = attrs.field(init=False)
    """Path or URL of report.json; its task fails if anything failed. A task that takes it runs after it."""


def training_pipeline(
    run: TrainingRun | Mapping[str, Any] | XComArg | None = None,
    target: Target | Mapping[str, Any] | XComArg | None = None,
    *,
    group_id: str = "training",
    asset: Asset | None = None,
    default_args: Mapping[str, Any] | None = None,
    **train_options: Any,
) -> TrainingPipeline:
    """Wire the steps: prepare, then stage and build, train, export; cleanup and report run in any case.

    Returns a task group: ``fetch >> training_pipeline(...) >> notify``. ``notify`` waits for ``export``.

    Args:
        run: What to train; None: the parameters of the DAG run (:func:`training_params`).
        target: Where to train; None: this machine, or the parameters of the DAG run if ``run`` is None.
        group_id: Name of the task group. A DAG may hold several.
        asset: The asset that the exported model is.
        default_args: Arguments of every task of the group, such as ``queue`` or ``retries`` (2 by default).
        train_options: What :class:`TrainOperator` takes: ``deferrable``, ``execution_timeout``, ``retries``
            (1 by default: a retry attaches to a training that still runs), ``pool``, ``queue``, ...
    """
    common = {"retries": 2, "retry_delay": RETRY_DELAY, **(default_args or {})}
    with (group := TrainingPipeline(group_id, default_args=common)):  # type: ignore[arg-type]
        fields = {"run": fields_of(run), "target": fields_of(target)}
        shared: dict[str, Any] = {"training": group.group_id, **fields}
        prepare = PrepareOperator(task_id="prepare", **shared)
        stage = StageDatasetOperator(task_id="stage", **shared)
        build = BuildImageOperator(task_id="build", **shared)
        # One retry by default, but none if `default_args` ask for none.
        train_options = {"retries": min(1, common["retries"]), **train_options}
        train = TrainOperator(
            task_id="train", **shared, staged=stage.output, built=build.output, **train_options
        )
        export = ExportModelOperator(task_id="export", **shared, handle=train.output, asset=asset)
        cleanup = CleanupOperator(task_id="cleanup", **shared)
        # A teardown gets its own rule below; DAGs that fail fast refuse any other rule than this one before.
        report = ReportOperator(
            task_id="report", **shared, written=cleanup.output, trigger_rule="all_success"
        )
        prepare >> [stage, build]
        # Only prepare is a setup: if a setup fails, its teardowns do not run.
        [stage, build, train, export] >> cleanup.as_teardown(setups=prepare)
        # Report alone decides the state of the DAG run: Airflow ignores the tasks before such a teardown.
        [export, cleanup] >> report.as_teardown(setups=prepare, on_failure_fail_dagrun=True)
        group.output, group.report = export.output, report.output
    return group
