"""prepare: find everything that can be known before a core is spent, and begin the ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING

from manycpu.operators.base import RunOperator, explained

if TYPE_CHECKING:
    from airflow.sdk import Context

__all__ = ["PrepareOperator"]


class PrepareOperator(RunOperator):
    """Check the run against its target, and begin the record of what it owns. The setup of ``cleanup``."""

    def execute(self, context: Context) -> None:
        """Run preflight, log its warnings, and begin the ledger.

        Raises:
            AirflowFailException: Bad input; nothing was started.
        """
        from manycpu.operators.worker_disk import findings
        from manycpu.pipeline.spec.errors import raise_findings
        from manycpu.pipeline.targets.attempt import join
        from manycpu.pipeline.verbs.prepare import prepare

        with explained():
            ctx = self.open(context)
            local_findings = list(findings(ctx, self.executor))
            raise_findings(local_findings)
            for finding in [*local_findings, *prepare(ctx)]:
                self.log.warning("%s", finding)
            with ctx.ledger.update() as entry:
                join(ctx, entry, "prepare")
        self.log.info("run %s is ready, its folder is %s", ctx.name, ctx.where)
