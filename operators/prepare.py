"""prepare: find everything that can be known before a core is spent, and begin the ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowFailException

from manycpu.operators.base import RunOperator, explained
from manycpu.operators.live import keep_refusal
from manycpu.operators.task_state import place_of

if TYPE_CHECKING:
    from airflow.sdk import Context

    from manycpu.pipeline.targets.context import RunContext

__all__ = ["PrepareOperator", "begin"]


class PrepareOperator(RunOperator):
    """Check the run against its target, and begin the record of what it owns. The setup of ``cleanup``."""

    def execute(self, context: Context) -> None:
        """Run preflight, log its warnings, and begin the ledger.

        Raises:
            AirflowFailException: Bad input; nothing was started.
        """
        try:
            with explained():
                begin(self.open(context), self.executor, self.log)
        except AirflowFailException as error:
            keep_refusal(error, place_of(context), self.log)
            raise


def begin(ctx: RunContext, executor: str | None, log: Any) -> None:
    """Run preflight, log its warnings, and begin the ledger.

    Args:
        ctx: The run.
        executor: The task's executor; None: Airflow's first one.
        log: The task's logger.

    Raises:
        BadInputError: Something is wrong; nothing was started.
    """
    from manycpu.operators.worker_disk import findings
    from manycpu.pipeline.spec.errors import raise_findings
    from manycpu.pipeline.targets.attempt import join
    from manycpu.pipeline.verbs.prepare import prepare

    local_findings = list(findings(ctx, executor))
    raise_findings(local_findings)
    for finding in [*local_findings, *prepare(ctx)]:
        log.warning("%s", finding)
    with ctx.ledger.update() as entry:
        join(ctx, entry, "prepare")
    log.info("run %s is ready, its folder is %s", ctx.name, ctx.where)
