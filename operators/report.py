"""report: have the last word on the run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manycpu.operators.base import RunOperator, explained

if TYPE_CHECKING:
    from airflow.sdk import Context

__all__ = ["ReportOperator"]


class ReportOperator(RunOperator):
    """Read report.json back, and fail the DAG run where any verb failed or anything is left behind."""

    def __init__(self, *, trigger_rule: str = "all_done", **kwargs: Any) -> None:
        super().__init__(trigger_rule=trigger_rule, **kwargs)

    def execute(self, context: Context) -> str:
        """Conclude; returns the path or URL of report.json.

        Raises:
            AirflowFailException: The run failed, was cancelled, or left something behind; with its error.
        """
        from airflow.sdk.exceptions import AirflowFailException

        from manycpu.pipeline.spec.errors import ManycpuError
        from manycpu.pipeline.verbs.report import conclude, read_report, report_path

        with explained():
            ctx = self.open(context)
        try:
            report = conclude(read_report(ctx))
        except ManycpuError as error:  # reading it again would find the same
            raise AirflowFailException(str(error)) from error
        for verb, record in report.verbs.items():
            self.log.info("%-8s %7.1f s  %s", verb, record.seconds, record.result)
        for name, value in report.metrics.items():
            self.log.info("%s: %s", name, value)
        path = report_path(ctx)
        self.log.info("report: %s", path)
        return path
