"""The operator of the step train: launch the training, or attach to it, and wait for its end.

WholeRunOperator does all steps of a run in one task.
"""

from __future__ import annotations

import math
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.sdk import Asset, timezone

from manycpu.operators import following
from manycpu.operators.airflow_versions import (
    AirflowException,
    AirflowFailException,
    AirflowTaskTimeout,
    TaskDeferralTimeout,
    TaskDeferred,
)
from manycpu.operators.base import RunOperator, failing_without_retry, require_begun
from manycpu.operators.following import (
    ENDED_BY_A_PERSON,
    ENDED_FOR_GOOD,
    NOTHING_FOLLOWS,
    PRESUMED_DEAD,
    DeferralTimer,
    Live,
    place_of,
    state_of,
)
from manycpu.operators.steps import clean_up_and_log, has_tries_left, prepare_run, set_asset_extra
from manycpu.pipeline.spec.errors import (
    BadInputError,
    CancelledError,
    ClusterError,
    ForeignRunError,
    ManycpuError,
    TrainingFailedError,
)
from manycpu.pipeline.spec.handle import Handle, read_handle
from manycpu.pipeline.spec.state import RunState, Status

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from airflow.sdk import Context, XComArg

    from manycpu.operators.triggers import FollowingTrigger
    from manycpu.pipeline import TrainingRun
    from manycpu.pipeline.listeners import RankListener
    from manycpu.pipeline.spec.targets import TargetFields
    from manycpu.pipeline.targets import Watch
    from manycpu.pipeline.targets.context import RunContext

RETRY_DELAY = timedelta(seconds=10)
SETTLE_S = 8.0  # after a deferral: by then the scheduler has noticed that the worker has ended
_DEADLINE_SLACK = timedelta(minutes=2)  # by which Airflow's own timeout comes after the trigger's deadline
_CENTURY_S = 100 * 365 * 86_400  # longest timeout of a deferral: its end must be a date of four-digit year
_CLUSTER_AWAY = timedelta(hours=2)  # longer than a trigger waits for a cluster that does not answer


class TrainOperator(RunOperator):
    """Launch the training and wait for it, in the triggerer after the first seconds.

    These are two verbs of a run; :func:`manycpu.pipeline.train` runs all of them, without Airflow.

    A retry attaches to a training that still runs, such as one whose worker was lost. If the training failed
    or was cancelled, a retry starts the next attempt, which resumes from the last checkpoint if there is one.
    A person who marks or clears the task ends the training.

    Args:
        training: Name of the training that this task is a part of, as :class:`RunOperator` has it; None: this
            task is a training of its own.
        staged: What ``stage`` returned; if None, or if the fields have changed or the run was cleaned up
            since, this operator stages.
        built: What ``build`` returned; if None, or if the fields have changed or the run was cleaned up
            since, this operator builds.
        deferrable: Whether to free the worker while the training runs: the triggerer follows it.
        kwargs: ``run``, ``target``, and what every operator of Airflow takes. ``execution_timeout`` counts
            from the start of each try, deferred or not.
    """

    template_fields = (*RunOperator.template_fields, "staged", "built")
    cleans_up = False
    """Whether the run belongs to this task alone: when a person ends the task, the run is cleaned up."""

    def __init__(
        self,
        *,
        training: str | None = None,
        staged: Mapping[str, Any] | XComArg | None = None,
        built: Mapping[str, Any] | XComArg | None = None,
        deferrable: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(training=training, **kwargs)
        self.staged = staged
        self.built = built
        self.deferrable = deferrable
        self._signalled = False
        self._deadline = math.inf  # seconds since the epoch at which this worker ends the training

    def on_kill(self) -> None:
        """Record that a signal came; the loop that follows the training then asks Airflow for the reason.

        Airflow calls this when a person ends the task, and also when the worker shuts down.
        """
        self._signalled = True

    def execute(self, context: Context) -> Any:
        """Launch and wait; returns the handle of the attempt that succeeded.

        Raises:
            AirflowFailException: Bad input, a rank that refused the program, or a cancellation: a retry would
                meet the same.
            TrainingFailedError: The training failed; with the first rank that failed and its last lines.
            TaskDeferred: The training runs, and the triggerer follows it.
        """
        with failing_without_retry():
            return self._train(context, self.open(context))

    def execute_complete(self, context: Context, event: dict[str, Any]) -> Any:
        """Resume after the trigger: conclude the attempt, or train again if an earlier try cancelled it.

        ``event`` holds the attempt's handle and status. If the status is not terminal, the triggerer could
        not see the attempt, and this worker follows it to the end. Returns what :meth:`finish` returns.

        Raises:
            AirflowTaskTimeout: The trigger ended the training at the deadline.
            AirflowFailException: Bad input, a rank that refused the program, or a cancellation.
            TrainingFailedError: The training failed.
        """
        from manycpu.pipeline.verbs.wait import conclude

        with failing_without_retry():
            handle, status = read_handle(event["handle"]), Status.model_validate(event["status"])
            ctx = require_begun(self.open(context, handle.run))
            canceller = ctx.ledger.read().cancelled.get(handle.attempt)
            if status.state is RunState.CANCELLED and canceller == "execution_timeout":
                with suppress(CancelledError):  # `conclude` records the end, and then raises this
                    conclude(ctx, handle, status)
                raise self._too_long()
            if status.state is RunState.UNKNOWN:
                self.log.warning(
                    "%s: this worker follows the training (docs/dag.md, Triggerers)", status.reason
                )
                self.deferrable = False
                # When a task resumes, Airflow's own timer of execution_timeout starts from 0.
                if (left := self._time_left(context)) is not None:
                    self._deadline = time.time() + left.total_seconds()
            if not status.state.terminal or _was_cancelled_by_earlier_try(ctx, handle, context):
                # `_train` attaches to an attempt that still runs, and launches another after a cancellation.
                return self._train(context, ctx)
            return self._conclude(context, ctx, handle, status)

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """Resume after the trigger; end the training here if no triggerer has done so at the deadline.

        Returns what :meth:`execute_complete` returns.

        Raises:
            TaskDeferralTimeout: The deferral timed out, and there is no ``execution_timeout`` or no attempt.
        """
        from manycpu.pipeline.verbs.cancel import cancel
        from manycpu.pipeline.verbs.wait import wait

        try:
            return super().resume_execution(next_method, next_kwargs, context)
        except TaskDeferralTimeout:
            if self.execution_timeout is None:  # the trigger no longer works; a retry attaches to the attempt
                raise
            with failing_without_retry():
                ctx = require_begun(self.open(context))
            handle = ctx.driver.present_handle(ctx, ctx.ledger.read())
            if handle is None:
                raise
            cancel(ctx, by="execution_timeout", attempt=handle.attempt)
            status = wait(ctx, handle).model_dump()
            return self.execute_complete(context, {"handle": handle.model_dump(), "status": status})

    def finish(self, context: Context, ctx: RunContext, handle: Handle) -> Any:  # noqa: ARG002 - overridden
        """Log where the model of a successful training is; returns the task's result, the attempt's handle.

        A subclass that does all steps in one task exports and cleans up here.
        """
        if ctx.run.output is not None:
            folder = ctx.driver.model_of(ctx, handle)
            self.log.info("the model is in %s: ExportModelOperator copies it to run.output", folder)
        return handle.model_dump(mode="json")

    def _train(self, context: Context, ctx: RunContext) -> Any:
        """Launch or attach, follow the training, and conclude; returns the task's result."""
        from manycpu.pipeline.verbs.cancel import cancel
        from manycpu.pipeline.verbs.launch import attach, edited, launch

        inputs: tuple[Any, Any] | None = None
        try:
            # After a person has cleared the task, the triggerer ends the old attempt, perhaps only when the
            # next try has begun. That try has then attached to the old attempt. It sees the attempt end, and
            # launches another one in the next turn. Each earlier try can end one attempt: so many turns.
            for _ in range(context["ti"].try_number + 1):
                attempt: int | None = None  # the attempt that a timeout cancels; None: the present one
                if present := attach(ctx):
                    handle, attached = present, True
                else:
                    inputs = inputs or self.stage_and_build_if_needed(ctx)
                    handle, attached = launch(ctx, *inputs)
                attempt = handle.attempt
                verb = "attached to" if attached else "launched"
                self.log.info("%s attempt %d, %s", verb, attempt, handle)
                if finding := edited(ctx, handle):  # what has changed since the attempt began
                    self.log.warning("%s", finding)
                with ctx.ledger.kept_alive(ctx.waiting_lease):
                    status = self._watch_in_worker(context, ctx, handle)
                if not _was_cancelled_by_earlier_try(ctx, handle, context):
                    break
                self.log.info("attempt %d was ended with the try that started it", attempt)
        except AirflowTaskTimeout:
            cancel(ctx, by="execution_timeout", attempt=attempt)
            raise
        return self._conclude(context, ctx, handle, status)

    def stage_and_build_if_needed(self, ctx: RunContext) -> tuple[Any, Any]:
        """Return what earlier tasks staged and built.

        What is missing, was made for other fields of the run, or is not recorded in the run's ledger, is
        staged or built now.
        """
        from manycpu.pipeline.targets.context import Built, Staged
        from manycpu.pipeline.verbs.build import build, built_from
        from manycpu.pipeline.verbs.stage import stage, staged_from

        if not ctx.ledger.exists():
            prepare_run(ctx, self.executor, self.log)
        # Without a record, the ledger is new: the run was cleaned up before this task was cleared. Then what
        # earlier tasks staged and built may be deleted, and this ledger protects none of it.
        records = ctx.ledger.read().verbs
        is_recorded = {verb: record.result != "failed" for verb, record in records.items()}
        staged = Staged.model_validate(self.staged or {})
        built = None if self.built is None else Built.model_validate(self.built)
        # The origin is a hash of the fields. It is empty in the result of an older version, which is used.
        is_staged = self.staged is not None and staged.origin in ("", staged_from(ctx))
        if not (is_staged and is_recorded.get("stage")):
            staged = stage(ctx, self.transfer_logger())
        if not (is_recorded.get("build") and built is not None and built.origin in ("", built_from(ctx))):
            built = build(ctx)
        return staged, built

    def _watch_in_worker(self, context: Context, ctx: RunContext, handle: Handle) -> Status:
        """Follow the training in this worker; returns its final status.

        Raises:
            AirflowTaskTimeout: The training has not ended by the deadline.
            TaskDeferred: The first seconds are over, and the triggerer continues.
            AirflowFailException: A person ended the task, and so the training.
            AirflowException: This worker stops, and the training continues.
        """
        from manycpu.pipeline.listeners import Guarded, flush, tell
        from manycpu.pipeline.targets.outcome import outcome
        from manycpu.pipeline.verbs.wait import POLL_INTERVAL_S, watch

        watching, timer = watch(ctx, handle), DeferralTimer(context["ti"].try_number)
        live = Live(watching.ctx, place_of(context), self.log)
        listeners = [*map(Guarded, (*following.listeners(self.log, watching.ctx, handle), timer))]
        try:
            while True:
                lines, status = watching.look()
                tell(lines, *listeners)
                if status.state.terminal:
                    return outcome(watching.ctx, status, watching.observed)
                if time.time() >= self._deadline:
                    raise self._too_long()
                live.show(status, watching.observed)
                if self._signalled or timer.is_check_due():
                    self._stop_if_task_ended(context, watching, listeners)
                if self.deferrable and timer.has_expired:
                    self._defer(context, watching, listeners)
                if not watching.behind:  # else more lines can be read at once
                    time.sleep(POLL_INTERVAL_S)
        finally:
            watching.close()
            flush(listeners)

    def _stop_if_task_ended(self, context: Context, watch: Watch, listeners: Iterable[RankListener]) -> None:
        """Raise an error if this process must stop; if a person ended the task, cancel the training first.

        Airflow ends it too, when the DAG run has used up its ``dagrun_timeout``; then this cleans up, as no
        other task runs.

        Raises:
            AirflowFailException: A person, or that timeout, ended the task.
            AirflowException: The worker shuts down, or Airflow presumes this process dead.
        """
        from manycpu.pipeline.listeners import tell
        from manycpu.pipeline.verbs.cancel import cancel

        state = _known_state(context)
        if state in ENDED_BY_A_PERSON:
            cancel(watch.ctx, by=_canceller(context), attempt=watch.handle.attempt)
            tell(watch.look()[0], *listeners)  # the last lines
            if state in NOTHING_FOLLOWS and not self.cleans_up:  # else the caller cleans up
                # First: Airflow kills this process in five seconds, and a person may have to clean up.
                watch.ctx.ledger.change_lease(ended=True)
                clean_up_and_log(watch.ctx, self.log, place_of(context), attempt=watch.handle.attempt)
            raise AirflowFailException("a person or a timeout ended this task, and the training with it")
        if self._signalled or state in PRESUMED_DEAD:
            raise AirflowException(
                "this worker stops before the training has ended: if a try is left, it attaches to it"
            )

    def _defer(self, context: Context, watch: Watch, listeners: Iterable[RankListener]) -> NoReturn:
        """Raise TaskDeferred: a triggerer follows the training from where this worker stops reading."""
        from manycpu.operators.job_trigger import JobTrigger
        from manycpu.operators.triggers import TrainingTrigger
        from manycpu.pipeline.listeners import tell

        watch.close()
        tell(watch.look()[0], *listeners)  # the last lines before the cursor from which the trigger reads
        now = time.time()
        remaining = self._time_left(context)
        trigger_class: type[FollowingTrigger] = JobTrigger if watch.handle.kind == "job" else TrainingTrigger
        trigger = trigger_class(
            handle=watch.handle.model_dump(mode="json"),
            cursor=watch.cursor,
            by=_canceller(context),
            not_before=now + SETTLE_S,
            deadline=None if remaining is None else now + remaining.total_seconds(),
            place=place_of(context),
            cleans=place_of(context) if self.cleans_up else None,
        )
        if remaining is None:
            timeout = _deferral_timeout(watch.ctx.run, watch.ctx.target)
        else:
            timeout = remaining + _DEADLINE_SLACK
        self.defer(trigger=trigger, method_name="execute_complete", timeout=timeout)

    def _time_left(self, context: Context) -> timedelta | None:
        """Return what is left of ``execution_timeout``: 0 if the time is over, None if there is no limit."""
        if self.execution_timeout is None:
            return None
        elapsed = timezone.utcnow() - context["ti"].start_date
        return max(timedelta(), self.execution_timeout - elapsed)

    def _too_long(self) -> AirflowTaskTimeout:
        return AirflowTaskTimeout(f"the training was ended: it took longer than {self.execution_timeout}")

    def _conclude(self, context: Context, ctx: RunContext, handle: Handle, status: Status) -> Any:
        """Record how the attempt ended and show it on the training's page; returns the task's result.

        Raises:
            AirflowFailException: A rank refused to run the program: a retry would be refused too.
            ManycpuError: The training failed otherwise, was cancelled, or used up a time budget.
        """
        from manycpu.pipeline.verbs.wait import conclude

        shown = status  # what the page shows: pending, not failed, if a retry follows
        if status.state is RunState.FAILED and not status.refused and has_tries_left(context):
            reason = f"attempt {handle.attempt} failed, and a retry follows: {status.in_short}"
            shown = status.model_copy(update={"state": RunState.PENDING, "reason": reason})
        try:
            conclude(ctx, handle, status)
        except TrainingFailedError as error:
            if status.refused:
                raise AirflowFailException(str(error)) from error  # a retry would be refused as well
            raise
        finally:
            Live(ctx, place_of(context), self.log).end(shown, partial(ctx.driver.observed_of, ctx, handle))
        return self.finish(context, ctx, handle)


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
        """Do the whole run; returns what rank 0 returned."""
        with self._cleaning_up_after_last_try(context):
            return super().execute(context)

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """Resume after the trigger ended or failed; clean up if the task fails and no retry follows."""
        with self._cleaning_up_after_last_try(context):
            return super().resume_execution(next_method, next_kwargs, context)

    def _train(self, context: Context, ctx: RunContext) -> Any:
        """Train; if an earlier try has exported the model, and was then killed, only conclude the run.

        The ledger records the number of this try. An earlier try that is still alive then does not clean up.
        """
        from manycpu.pipeline.verbs.cleanup import only_cleanup_is_left

        instance: Any = context["ti"]
        # A task that a person cleared trains again: Airflow has added to its `max_tries` then.
        is_retry = instance.try_number > 1 and instance.max_tries == self.retries
        if only_cleanup_is_left(ctx, or_nothing=is_retry):
            return self._conclude_run(context, ctx)
        if ctx.ledger.exists():
            with ctx.ledger.update() as entry:
                # A process that was frozen while a later try began must not lower the number. A try 1 may:
                # after a higher number, it means that the DAG run was deleted and created again.
                if instance.try_number == 1 or instance.try_number > entry.latest_try:
                    entry.latest_try = instance.try_number
        return super()._train(context, ctx)

    def finish(self, context: Context, ctx: RunContext, handle: Handle) -> Any:
        """Export, clean up, and conclude; returns what rank 0 returned."""
        from manycpu.pipeline.verbs.export import export

        export(ctx, handle, self.transfer_logger())
        return self._conclude_run(context, ctx)

    def _conclude_run(self, context: Context, ctx: RunContext) -> Any:
        """Clean up, put the model's path into the events of the outlets, and return what rank 0 returned.

        Raises:
            AirflowFailException: The report has an error, or rank 0 returned nothing. There is no retry: it
                would train again.
            ClusterError: The cluster does not answer; the next try only cleans up.
        """
        from manycpu.pipeline.verbs.export import Exported
        from manycpu.pipeline.verbs.report import conclude, read_report, report_path

        try:
            # None: an earlier try has cleaned up.
            report = clean_up_and_log(ctx, self.log, place_of(context)) or read_report(ctx)
            for name, value in conclude(report).metrics.items():
                self.log.info("%s: %s", name, value)
        except ClusterError:  # a retry may succeed, and only cleans up
            raise
        except ManycpuError as error:
            raise AirflowFailException(str(error)) from error
        self.log.info("report: %s", report_path(ctx))
        if report.export is not None:
            exported = Exported(**report.export, metrics=report.metrics)
            for asset in self.outlets:
                if isinstance(asset, Asset):
                    set_asset_extra(asset, context, exported)
        if report.has_returned is False:  # None: an older version wrote the report
            raise AirflowFailException(
                "the training succeeded, but rank 0 returned nothing: the function ended its process itself. "
                "Let it return instead"
            )
        return report.returned

    @contextmanager
    def _cleaning_up_after_last_try(self, context: Context) -> Iterator[None]:
        """Clean up if the block fails and no retry follows; a failure to clean up is only logged."""
        try:
            yield
        except TaskDeferred:  # the training still runs
            raise
        except BaseException as error:
            # Another task or process has the run; `failing_without_retry` has wrapped the ForeignRunError.
            belongs_to_another = isinstance(error.__cause__, ForeignRunError)
            if not belongs_to_another and not _has_next_try(context, error):
                try:
                    with suppress(BadInputError):  # the run never began
                        ctx = self.open(context)
                        if not _has_later_try(ctx, context):
                            clean_up_and_log(ctx, self.log, place_of(context))
                except Exception:
                    self.log.exception("the run is not cleaned up; `manycpu clean` tries again")
            raise


def _deferral_timeout(run: TrainingRun, target: TargetFields) -> timedelta | None:
    """Return the timeout of a deferral without ``execution_timeout``: longer than all budgets of the run.

    So only a trigger that no longer works reaches it. None: there is no such limit, because a queue may
    preempt the run any number of times, and each wait may last ``queue_timeout``.
    """
    if target.waits_in_queue:
        return None
    waits = run.queue_timeout * (1 + run.max_restarts)  # restarted ranks may wait for capacity again
    seconds = min(run.acknowledge_timeout + waits + run.run_timeout, _CENTURY_S)
    return timedelta(seconds=seconds) + _CLUSTER_AWAY


def _canceller(context: Context) -> str:
    """Name this try of the task, for the ledger's record of who cancelled an attempt."""
    instance = context["ti"]
    return f"task {instance.task_id}, try {instance.try_number} ({instance.id})"


def _was_cancelled_by_earlier_try(ctx: RunContext, handle: Handle, context: Context) -> bool:
    """Whether an earlier try of this task cancelled the attempt, because a person cleared the task.

    If so, the present try launches another attempt.
    """
    canceller = ctx.ledger.read().cancelled.get(handle.attempt, "")
    is_this_task = canceller.startswith(f"task {context['ti'].task_id}, try ")
    return is_this_task and canceller != _canceller(context)


def _has_later_try(ctx: RunContext, context: Context) -> bool:
    """Whether a later try of the task works on the run: then Airflow has presumed this process dead."""
    latest_try = ctx.ledger.read().latest_try if ctx.ledger.exists() else 0
    return latest_try > context["ti"].try_number


def _has_next_try(context: Context, error: BaseException) -> bool:
    """Whether Airflow will run the task again after this error.

    A state that a person gave the task decides first, then the kind of error, the number of tries and the
    task's retry policy.
    """
    state = _known_state(context)
    if state in ENDED_FOR_GOOD:
        return False
    if state in PRESUMED_DEAD or state == "restarting":  # restarting: a person cleared the task
        return True
    if isinstance(error, AirflowFailException) or not has_tries_left(context):
        return False
    instance: Any = context["ti"]
    policy = getattr(context["task"], "retry_policy", None)  # before Airflow 3.3 there is none
    with suppress(Exception):  # Airflow ignores a policy that raises
        if policy is not None:
            decision = policy.evaluate(error, instance.try_number, instance.max_tries, context)
            return bool(decision.action.value != "fail")
    return True


def _known_state(context: Context) -> str | None:
    """Ask Airflow for the task's state; None: it has none, or Airflow does not answer."""
    try:
        return state_of(place_of(context))
    except AirflowException:
        return None
