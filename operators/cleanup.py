"""cleanup: leave nothing of the run but its output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manycpu.operators.base import RunOperator, explained
from manycpu.operators.clean_up import clean_up
from manycpu.operators.task_state import place_of

if TYPE_CHECKING:
    from airflow.sdk import Context

__all__ = ["CleanupOperator"]


class CleanupOperator(RunOperator):
    """End what still runs, write the report, delete what the run owns. A teardown of ``prepare``."""

    def execute(self, context: Context) -> dict[str, Any]:
        """Clean up; harmless when there is nothing to clean.

        Returns:
            The report where ``run.output`` is null: there is no place for it that every worker sees. Else
            an empty one: none at all would be an error in the log of the task that takes it.

        Raises:
            LaunchError: A process of the run does not end.
        """
        with explained():
            ctx = self.open(context)
            report = clean_up(ctx, self.log, place_of(context))
        return report.model_dump(mode="json") if report and ctx.run.output is None else {}
