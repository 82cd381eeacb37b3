"""report: read report.json, and make it the result of the DAG run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manycpu.operators.base import RunOperator, explained
from manycpu.operators.prepare import PrepareOperator

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow.sdk import Context
    from airflow.sdk.definitions.xcom_arg import XComArg

__all__ = ["ReportOperator"]

_BAD = frozenset({"failed", "upstream_failed"})


class ReportOperator(RunOperator):
    """Read report.json back, and fail the DAG run where any verb failed or anything is left behind.

    Args:
        written: What ``cleanup`` returned: the report of a run whose ``output`` is null.
        trigger_rule: When the task runs: whatever happened before, unless told otherwise.
        kwargs: ``run``, ``target``, and what every operator of Airflow takes.
    """

    template_fields = (*RunOperator.template_fields, "written")

    def __init__(
        self,
        *,
        written: Mapping[str, Any] | XComArg | None = None,
        trigger_rule: str = "all_done",
        **kwargs: Any,
    ) -> None:
        super().__init__(trigger_rule=trigger_rule, **kwargs)
        self.written = written

    def execute(self, context: Context) -> str:
        """Raise what the report records; returns the path or URL of report.json.

        Raises:
            AirflowFailException: The run failed, was cancelled, or left something behind; with its error.
            AirflowSkipException: The training was skipped.
        """
        from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

        from manycpu.pipeline.run_report import Report
        from manycpu.pipeline.spec.errors import ManycpuError
        from manycpu.pipeline.spec.tracking import place_in_words
        from manycpu.pipeline.verbs.report import conclude, read_report, report_path

        states = self._states(context)
        failed = [task for task, state in states if state in _BAD]
        prepared = {state for task, state in states if _is_of_class(task, PrepareOperator)}
        if "skipped" in prepared:
            raise AirflowSkipException("the training was skipped: a branch before it went elsewhere")
        if prepared & _BAD:
            # What is there to read is of an earlier time, before the DAG run was cleared.
            raise AirflowFailException("the run ended without a report: it never got past prepare")
        with explained():
            ctx = self.open(context)
        try:
            report = conclude(Report.model_validate(self.written) if self.written else read_report(ctx))
        except ManycpuError as error:  # reading it again would find the same
            raise AirflowFailException(str(error)) from error
        for verb, record in report.verbs.items():
            self.log.info("%-8s %7.1f s  %s", verb, record.seconds, record.result)
        for name, value in report.metrics.items():
            self.log.info("%s: %s", name, value)
        for name, place in report.trackers.items():
            self.log.info("%s", place_in_words(name, place))
        path = report_path(ctx)
        if failed:
            names = ", ".join(sorted(task.task_id for task in failed))
            raise AirflowFailException(f"{path} tells of no failure, but {names} failed")
        self.log.info("report: %s", path)
        return path

    def _states(self, context: Context) -> list[tuple[Any, str | None]]:
        """List the tasks of this training that came before this one, and how each ended, this time."""
        relatives: Any = self.get_flat_relatives(upstream=True)
        mine = {task.task_id: task for task in relatives if self._shares_run(task)}
        if not mine:
            return []
        instance: Any = context["ti"]
        by_run = instance.get_task_states(
            dag_id=instance.dag_id, map_index=instance.map_index, task_ids=[*mine], run_ids=[instance.run_id]
        )
        states = by_run.get(instance.run_id, {})
        end = "" if instance.map_index < 0 else f"_{instance.map_index}"
        return [(task, states.get(name + end)) for name, task in mine.items()]

    def _shares_run(self, task: Any) -> bool:
        fields = getattr(task, "partial_kwargs", None) or vars(task)
        return _is_of_class(task, RunOperator) and fields.get("training") == self.training is not None


def _is_of_class(task: Any, kind: type) -> bool:
    """Whether a task is of an operator's class, also where it is expanded."""
    return issubclass(getattr(task, "operator_class", type(task)), kind)
