"""report: have the last word on the run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manycpu.operators.base import RunOperator, explained

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow.sdk import Context
    from airflow.sdk.definitions.xcom_arg import XComArg

__all__ = ["ReportOperator"]


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
        """Conclude; returns the path or URL of report.json.

        Raises:
            AirflowFailException: The run failed, was cancelled, or left something behind; with its error.
        """
        from airflow.sdk.exceptions import AirflowFailException

        from manycpu.pipeline.report import Report
        from manycpu.pipeline.spec.errors import ManycpuError
        from manycpu.pipeline.verbs.report import conclude, read_report, report_path

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
        path = report_path(ctx)
        self.log.info("report: %s", path)
        return path
