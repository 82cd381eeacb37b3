"""A whole run in one task: all verbs, one after the other, and nothing left of it at its end."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import Asset
from airflow.sdk.exceptions import AirflowFailException, TaskDeferred

from manycpu.operators.clean_up import clean_up
from manycpu.operators.export import describe
from manycpu.operators.prepare import begin
from manycpu.operators.task_state import ENDED_FOR_GOOD, TAKEN_OVER, place_of, state_of
from manycpu.operators.train import TrainOperator

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from airflow.sdk import Context

    from manycpu.pipeline.run_report import Report
    from manycpu.pipeline.spec.handle import Handle
    from manycpu.pipeline.targets.context import RunContext
    from manycpu.pipeline.verbs.export import Exported

__all__ = ["RETRY_DELAY", "WholeRunOperator"]

RETRY_DELAY = timedelta(seconds=10)


class WholeRunOperator(TrainOperator):
    """Train, as :class:`TrainOperator` does, export, clean up, and return what rank 0 returned.

    What the next try goes on with stays: a training that lives or has succeeded, and checkpoints. After the
    last try, and where a person ends the task, nothing stays but a model that could not be exported.

    Args:
        retries: 1 by default: a try that finds a training alive attaches to it.
        retry_delay: 10 seconds by default.
        kwargs: What :class:`TrainOperator` takes.
    """

    cleans_up = True

    def __init__(
        self, *, retries: int | None = 1, retry_delay: timedelta | float = RETRY_DELAY, **kwargs: Any
    ) -> None:
        super().__init__(retries=retries, retry_delay=retry_delay, **kwargs)

    def execute(self, context: Context) -> Any:
        """Do all of it; returns what rank 0 returned.

        Raises:
            AirflowFailException: What the next try would meet too; or something was left behind.
            ManycpuError: A verb failed.
            TaskDeferred: The training goes on, and the triggerer follows it.
        """
        with self._leaving_nothing(context):
            return super().execute(context)

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """Go on after the triggerer, also where that has failed."""
        with self._leaving_nothing(context):
            return super().resume_execution(next_method, next_kwargs, context)

    def _train(self, context: Context, ctx: RunContext) -> Any:
        """Train, unless an earlier try has exported the model and was killed while it cleaned up."""
        from manycpu.pipeline.verbs.cleanup import only_cleanup_is_left
        from manycpu.pipeline.verbs.export import Exported

        if not only_cleanup_is_left(ctx):
            return super()._train(context, ctx)
        report = self._conclude_run(context, ctx)
        if report.export is not None:
            self._describe_outlets(context, Exported(**report.export, metrics=report.metrics))
        return report.returned

    def staged_and_built(self, ctx: RunContext) -> tuple[Any, Any]:
        """Prepare, unless an earlier try has; then stage and build."""
        if not ctx.ledger.exists():
            begin(ctx, self.executor, self.log)
        return super().staged_and_built(ctx)

    def finish(self, context: Context, ctx: RunContext, handle: Handle) -> Any:
        """Export, clean up, and conclude; returns what rank 0 returned."""
        from manycpu.pipeline.verbs.export import export
        from manycpu.pipeline.verbs.wait import observed_of

        exported = export(ctx, handle, self.transferred())
        observed = observed_of(ctx, handle)
        self._conclude_run(context, ctx)
        if not observed.has_returned:
            raise AirflowFailException(
                "the training ended well, and rank 0 returned nothing: the function ended its process "
                "itself. Have it return"
            )
        self._describe_outlets(context, exported)
        return observed.returned

    def _describe_outlets(self, context: Context, exported: Exported) -> None:
        for asset in self.outlets:
            if isinstance(asset, Asset):
                describe(asset, context, exported)

    def _conclude_run(self, context: Context, ctx: RunContext) -> Report:
        """Clean up, and raise what the report records: another try would train again, and meet the same."""
        from manycpu.pipeline.spec.errors import ManycpuError
        from manycpu.pipeline.verbs.report import conclude, read_report, report_path

        try:
            report = clean_up(ctx, self.log, place_of(context)) or read_report(ctx)
            self._tell(conclude(report))
        except ManycpuError as error:
            raise AirflowFailException(str(error)) from error
        self.log.info("report: %s", report_path(ctx))
        return report

    def _tell(self, report: Report) -> None:
        for name, value in report.metrics.items():
            self.log.info("%s: %s", name, value)

    @contextmanager
    def _leaving_nothing(self, context: Context) -> Iterator[None]:
        """Clean up where the block fails and no other try comes."""
        from manycpu.pipeline.spec.errors import ForeignRunError

        try:
            yield
        except TaskDeferred:
            raise
        except BaseException as error:
            # A run that another process works on is not touched.
            if not isinstance(error.__cause__, ForeignRunError) and not _has_next_try(context, error):
                self._abandon(context)
            raise

    def _abandon(self, context: Context) -> None:
        from manycpu.pipeline.spec.errors import BadInputError

        try:
            clean_up(self.open(context), self.log, place_of(context))
        except BadInputError:  # which is why nothing ever began
            return
        except Exception:
            self.log.exception("the run is not cleaned up; `manycpu clean` tries again")


def _has_next_try(context: Mapping[str, Any] | Context, error: BaseException) -> bool:
    """Whether Airflow tries the task again after an error: what a person has said comes first."""
    instance: Any = context["ti"]
    state = state_of(place_of(context))  # type: ignore[arg-type]
    if state in ENDED_FOR_GOOD:
        return False
    if state in TAKEN_OVER or state == "restarting":
        return True
    return not isinstance(error, AirflowFailException) and instance.try_number <= instance.max_tries
