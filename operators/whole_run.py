"""The operator that does a whole run in one task: all verbs one after the other, with clean-up at the end."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import Asset, Context
from airflow.sdk.exceptions import AirflowFailException, TaskDeferred

from manycpu.operators.following import ENDED_FOR_GOOD, PRESUMED_DEAD, place_of, state_of
from manycpu.operators.steps import clean_up_and_log, prepare_run, set_asset_extra
from manycpu.operators.train import TrainOperator
from manycpu.pipeline.spec.errors import BadInputError, ForeignRunError, ManycpuError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from manycpu.pipeline.run_report import Report
    from manycpu.pipeline.spec.handle import Handle
    from manycpu.pipeline.targets.context import RunContext
    from manycpu.pipeline.verbs.export import Exported

__all__ = ["RETRY_DELAY", "WholeRunOperator"]

RETRY_DELAY = timedelta(seconds=10)


class WholeRunOperator(TrainOperator):
    """Train, as :class:`TrainOperator` does, export, clean up, and return what rank 0 returned.

    Between tries the run keeps what the next try needs: a training that runs or has succeeded, and
    checkpoints. After the last try, or when a person ends the task, only a model without a verified export
    is kept.

    Args:
        retries: 1 by default: a retry attaches to a training that still runs.
        retry_delay: 10 seconds by default.
        kwargs: What :class:`TrainOperator` takes.
    """

    cleans_up = True

    def __init__(
        self, *, retries: int | None = 1, retry_delay: timedelta | float = RETRY_DELAY, **kwargs: Any
    ) -> None:
        super().__init__(retries=retries, retry_delay=retry_delay, **kwargs)

    def execute(self, context: Context) -> Any:
        """Do the whole run; returns what rank 0 returned.

        Raises:
            AirflowFailException: The next try would fail too, or clean-up left something behind.
            ManycpuError: A verb failed.
            TaskDeferred: The training runs, and the triggerer follows it.
        """
        with self._cleaning_up_after_last_try(context):
            return super().execute(context)

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """Resume after the triggerer, also when the triggerer failed."""
        with self._cleaning_up_after_last_try(context):
            return super().resume_execution(next_method, next_kwargs, context)

    def _train(self, context: Context, ctx: RunContext) -> Any:
        """Train, unless an earlier try exported the model and was killed during its clean-up."""
        from manycpu.pipeline.verbs.cleanup import only_cleanup_is_left
        from manycpu.pipeline.verbs.export import Exported

        if not only_cleanup_is_left(ctx):
            return super()._train(context, ctx)
        report = self._conclude_run(context, ctx)
        if report.export is not None:
            self._describe_outlets(context, Exported(**report.export, metrics=report.metrics))
        return report.returned

    def staged_and_built(self, ctx: RunContext) -> tuple[Any, Any]:
        """Prepare, unless an earlier try did; then stage and build."""
        if not ctx.ledger.exists():
            prepare_run(ctx, self.executor, self.log)
        return super().staged_and_built(ctx)

    def finish(self, context: Context, ctx: RunContext, handle: Handle) -> Any:
        """Export, clean up, and conclude; returns what rank 0 returned."""
        from manycpu.pipeline.verbs.export import export
        from manycpu.pipeline.verbs.wait import observed_of

        exported = export(ctx, handle, self.transfer_logger())
        observed = observed_of(ctx, handle)
        self._conclude_run(context, ctx)
        if not observed.has_returned:
            raise AirflowFailException(
                "the training succeeded, but rank 0 returned nothing: the function ended its process itself. "
                "Let it return instead"
            )
        self._describe_outlets(context, exported)
        return observed.returned

    def _describe_outlets(self, context: Context, exported: Exported) -> None:
        for asset in self.outlets:
            if isinstance(asset, Asset):
                set_asset_extra(asset, context, exported)

    def _conclude_run(self, context: Context, ctx: RunContext) -> Report:
        """Clean up, and fail without retry if the report has an error: a retry would only train again."""
        from manycpu.pipeline.verbs.report import conclude, read_report, report_path

        try:
            report = clean_up_and_log(ctx, self.log, place_of(context)) or read_report(ctx)
            for name, value in conclude(report).metrics.items():
                self.log.info("%s: %s", name, value)
        except ManycpuError as error:
            raise AirflowFailException(str(error)) from error
        self.log.info("report: %s", report_path(ctx))
        return report

    @contextmanager
    def _cleaning_up_after_last_try(self, context: Context) -> Iterator[None]:
        """Clean up if the block fails and no retry follows."""
        try:
            yield
        except TaskDeferred:
            raise
        except BaseException as error:
            # A run that another process works on is not touched.
            if not isinstance(error.__cause__, ForeignRunError) and not _has_next_try(context, error):
                self._clean_up_failed_run(context)
            raise

    def _clean_up_failed_run(self, context: Context) -> None:
        try:
            clean_up_and_log(self.open(context), self.log, place_of(context))
        except BadInputError:  # bad input: the run never began
            return
        except Exception:
            self.log.exception("the run is not cleaned up; `manycpu clean` tries again")


def _has_next_try(context: Context, error: BaseException) -> bool:
    """Whether Airflow retries the task after an error; the state that a person gave the task comes first."""
    instance: Any = context["ti"]
    state = state_of(place_of(context))
    if state in ENDED_FOR_GOOD:
        return False
    if state in PRESUMED_DEAD or state == "restarting":
        return True
    return not isinstance(error, AirflowFailException) and instance.try_number <= instance.max_tries
