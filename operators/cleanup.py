"""cleanup: leave nothing of the run but its output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from manycpu.operators.base import RunOperator, explained

if TYPE_CHECKING:
    from airflow.sdk import Context

__all__ = ["CleanupOperator"]


class CleanupOperator(RunOperator):
    """End what still runs, write the report, delete what the run owns. A teardown of ``prepare``."""

    def execute(self, context: Context) -> None:
        """Clean up; harmless when there is nothing to clean.

        Raises:
            LaunchError: A process of the run does not end.
        """
        from manycpu.pipeline.verbs.cleanup import cleanup

        with explained():
            report = cleanup(self.open(context))
        if report is None:
            self.log.info("nothing to clean up")
            return
        for place in report.left_behind:
            self.log.error("left behind: %s", place)
        for place in report.kept:
            self.log.info("kept: %s", place)
