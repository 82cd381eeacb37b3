"""train: launch the training, or attach to it, and wait for its end."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from manycpu.operators import task_log
from manycpu.operators.base import RunOperator, explained, require_begun
from manycpu.operators.live import Live
from manycpu.operators.patience import Patience
from manycpu.operators.task_state import ENDED_BY_A_PERSON, TAKEN_OVER, place_of, state_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from airflow.sdk import Context
    from airflow.sdk.definitions.xcom_arg import XComArg

    from manycpu.operators.base_trigger import FollowingTrigger
    from manycpu.pipeline.listeners import RankListener
    from manycpu.pipeline.spec.handle import Handle
    from manycpu.pipeline.spec.state import Status
    from manycpu.pipeline.spec.targets import Target
    from manycpu.pipeline.spec.training_run import TrainingRun
    from manycpu.pipeline.targets import Watch
    from manycpu.pipeline.targets.context import RunContext

__all__ = ["TrainOperator"]

SETTLED = 8.0  # seconds until the scheduler has surely noticed that the worker is done with a deferred task
_SLACK = timedelta(minutes=2)  # the trigger keeps the deadline; this much later Airflow would
_AWAY = timedelta(hours=2)  # longer than a trigger waits for a cluster that does not answer


class TrainOperator(RunOperator):
    """Launch the training and wait for it, in the triggerer after the first seconds.

    These are two verbs of a run; :func:`manycpu.pipeline.train` runs all of them, without Airflow.

    A retry attaches to the training that a lost worker left behind; one that failed or was cancelled is
    followed by the next attempt, from its last checkpoint where there is one. A person who marks or clears
    the task ends the training.

    Args:
        training: Name of the training that this task is a part of, as :class:`RunOperator` has it; None: this
            task is a training of its own.
        staged: What ``stage`` returned; None, or where other fields were staged: this operator stages.
        built: What ``build`` returned; None, or where other fields were built: this operator builds.
        deferrable: Whether to give the worker back while the training goes on.
        kwargs: ``run``, ``target``, and what every operator of Airflow takes. ``execution_timeout`` counts
            from the start of each try, deferred or not.
    """

    template_fields = (*RunOperator.template_fields, "staged", "built")
    cleans_up = False
    """Whether the run goes with the task: then nothing is left of it when a person ends the task."""

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

    def on_kill(self) -> None:
        """Note that somebody wants this process to end; ``execute`` finds out who.

        Airflow calls this when a person ends the task, and just the same when the worker shuts down.
        """
        self._signalled = True

    def execute(self, context: Context) -> Any:
        """Launch and wait; returns the handle of the attempt that succeeded.

        Raises:
            AirflowFailException: Bad input, a refusal that the next try would meet too, or cancelled.
            TrainingFailedError: The training failed; with the first rank that failed and its last lines.
            TaskDeferred: The training goes on, and the triggerer follows it.
        """
        with explained():
            return self._train(context, self.open(context))

    def execute_complete(self, context: Context, event: dict[str, Any]) -> Any:
        """Go on after the trigger's event."""
        from manycpu.pipeline.spec.handle import read_handle
        from manycpu.pipeline.spec.state import Status

        with explained():
            handle, status = read_handle(event["handle"]), Status.model_validate(event["status"])
            ctx = require_begun(self.open(context, handle.run))
            if event["timed_out"]:
                self._raise_timeout(ctx, handle, status)
            if _ended_by_earlier_try(ctx, handle, context):
                return self._train(context, ctx)
            return self._conclude(context, ctx, handle, status)

    def finish(self, context: Context, ctx: RunContext, handle: Handle) -> Any:  # noqa: ARG002 - others use it
        """Go on after a training that succeeded; returns the task's result, the attempt's handle."""
        if ctx.run.output is not None:
            folder = ctx.driver.model_of(ctx, handle)
            self.log.info("the model is in %s: ExportModelOperator brings it to run.output", folder)
        return handle.model_dump(mode="json")

    def _train(self, context: Context, ctx: RunContext) -> Any:
        from manycpu.pipeline.verbs.launch import edited, launch

        staged, built = self.staged_and_built(ctx)
        # A task that is cleared starts its next try before the triggerer has ended the old attempt: that try
        # attaches, sees the end come, and launches anew. Each earlier try can do this to it once.
        for _ in range(context["ti"].try_number + 1):
            handle, attached = launch(ctx, staged, built)
            verb = "attached to" if attached else "launched"
            self.log.info("%s attempt %d, %s", verb, handle.attempt, handle)
            if finding := edited(ctx, handle, staged, built):
                self.log.warning("%s", finding)
            with ctx.ledger.kept_alive(ctx.waiting_lease):
                status = self._watch_in_worker(context, ctx, handle)
            if not _ended_by_earlier_try(ctx, handle, context):
                break
            self.log.info("attempt %d was ended with the try that started it", handle.attempt)
        return self._conclude(context, ctx, handle, status)

    def staged_and_built(self, ctx: RunContext) -> tuple[Any, Any]:
        """Take what was staged and built; do so here where it is missing, or came from other fields."""
        from manycpu.pipeline.targets.attempt import join
        from manycpu.pipeline.targets.results import Built, Staged
        from manycpu.pipeline.verbs.build import build, built_from
        from manycpu.pipeline.verbs.prepare import prepare
        from manycpu.pipeline.verbs.stage import stage, staged_from

        # No ledger: this operator stands alone, or was cleared by itself after the run was cleaned up.
        fresh = not ctx.ledger.exists()
        if fresh:
            prepare(ctx)
        with ctx.ledger.update() as entry:
            join(ctx, entry, "train")
        staged = Staged.model_validate(self.staged or {})
        built = None if self.built is None else Built.model_validate(self.built)
        if fresh or self.staged is None or staged.origin not in ("", staged_from(ctx)):
            staged = stage(ctx, self.transferred())
        if fresh or built is None or built.origin not in ("", built_from(ctx)):
            built = build(ctx)
        return staged, built

    def _watch_in_worker(self, context: Context, ctx: RunContext, handle: Handle) -> Status:
        """Follow the training in this worker: to its end, or for the first seconds only."""
        from airflow.sdk.exceptions import AirflowTaskTimeout

        from manycpu.pipeline.listeners import Guarded, flush, tell
        from manycpu.pipeline.targets.outcome import outcome
        from manycpu.pipeline.verbs.cancel import cancel
        from manycpu.pipeline.verbs.wait import POLL, watch

        watching, patience = watch(ctx, handle), Patience()
        live = Live(watching.ctx, place_of(context), self.log)
        heard_by = (*task_log.listeners(self.log, watching.ctx, handle), patience)
        listeners = [*map(Guarded, heard_by)]
        try:
            while True:
                lines, status = watching.look()
                tell(lines, *listeners)
                if status.state.terminal:
                    return outcome(watching.ctx, status, watching.observed)
                live.show(status, watching.observed)
                if self._signalled or patience.asks():
                    self._handle_signal(context, watching, listeners)
                if self.deferrable and patience.ends:
                    self._defer(context, watching, listeners)
                if not watching.behind:
                    time.sleep(POLL)
        except AirflowTaskTimeout:
            cancel(ctx, by="execution_timeout", attempt=handle.attempt)
            raise
        finally:
            watching.close()
            flush(listeners)

    def _handle_signal(self, context: Context, watch: Watch, listeners: Iterable[RankListener]) -> None:
        """Find out who wants this process to end: a person, who ends the training too, or the worker."""
        from airflow.sdk.exceptions import AirflowException, AirflowFailException

        from manycpu.pipeline.listeners import tell
        from manycpu.pipeline.verbs.cancel import cancel

        state = state_of(place_of(context))
        if state in ENDED_BY_A_PERSON:
            cancel(watch.ctx, by=_canceller(context), attempt=watch.handle.attempt)
            tell(watch.look()[0], *listeners)
            raise AirflowFailException("a person ended this task, and the training with it")
        if self._signalled or state in TAKEN_OVER:
            raise AirflowException(
                "this worker is going away; the training goes on, and the next try attaches to it"
            )

    def _defer(self, context: Context, watch: Watch, listeners: Iterable[RankListener]) -> NoReturn:
        from manycpu.operators.job_trigger import JobTrigger
        from manycpu.operators.triggers import TrainingTrigger
        from manycpu.pipeline.listeners import tell

        watch.close()
        tell(watch.look()[0], *listeners)
        now, remaining = time.time(), self._remaining_time(context)
        triggers: dict[str, type[FollowingTrigger]] = {"job": JobTrigger}  # which share a watch
        trigger = triggers.get(watch.handle.kind, TrainingTrigger)(
            handle=watch.handle.model_dump(mode="json"),
            cursor=watch.cursor,
            by=_canceller(context),
            not_before=now + SETTLED,
            deadline=None if remaining is None else now + remaining.total_seconds(),
            place=place_of(context),
            cleans=place_of(context) if self.cleans_up else None,
        )
        timeout = _latest(watch.ctx.run, watch.ctx.target) if remaining is None else remaining + _SLACK
        self.defer(trigger=trigger, method_name="execute_complete", timeout=timeout)

    def _remaining_time(self, context: Context) -> timedelta | None:
        if self.execution_timeout is None:
            return None
        from airflow.sdk import timezone

        began = context["ti"].start_date
        return max(timedelta(), self.execution_timeout - (timezone.utcnow() - began))

    def _raise_timeout(self, ctx: RunContext, handle: Handle, status: Status) -> NoReturn:
        from airflow.sdk.exceptions import AirflowTaskTimeout

        from manycpu.pipeline.spec.errors import CancelledError
        from manycpu.pipeline.verbs.wait import conclude

        with suppress(CancelledError):
            conclude(ctx, handle, status)
        raise AirflowTaskTimeout(f"the training was ended: not done within {self.execution_timeout}")

    def _conclude(self, context: Context, ctx: RunContext, handle: Handle, status: Status) -> Any:
        from airflow.sdk.exceptions import AirflowFailException

        from manycpu.pipeline.spec.errors import TrainingFailedError
        from manycpu.pipeline.verbs.wait import conclude, observed_of

        try:
            conclude(ctx, handle, status)
        except TrainingFailedError as error:
            if status.refused:
                raise AirflowFailException(str(error)) from error  # another try would be refused as well
            raise
        finally:
            shown = _with_next_try(status, handle, context)
            Live(ctx, place_of(context), self.log).end(shown, partial(observed_of, ctx, handle))
        return self.finish(context, ctx, handle)


def _with_next_try(status: Status, handle: Handle, context: Context) -> Status:
    """Say how an attempt failed that another try is to follow: the training has not failed yet."""
    from manycpu.pipeline.spec.state import RunState

    instance: Any = context["ti"]
    if status.state is not RunState.FAILED or status.refused or instance.try_number > instance.max_tries:
        return status
    reason = f"attempt {handle.attempt} failed, and another is to follow: {status.in_short}"
    return status.model_copy(update={"state": RunState.PENDING, "reason": reason})


def _latest(run: TrainingRun, target: Target) -> timedelta | None:
    """Return how long the run's own deadlines let it take at most: later, nobody follows it any more.

    None where a queue may preempt it any number of times: each wait has all of ``queue_timeout``.
    """
    if getattr(target, "queue", None):
        return None
    waits = run.queue_timeout * (1 + run.max_restarts)
    return timedelta(seconds=run.acknowledge_timeout + waits + run.run_timeout) + _AWAY


def _canceller(context: Context) -> str:
    """Return the name of this try, which ends a training when a person ends the task."""
    instance = context["ti"]
    return f"task {instance.task_id}, try {instance.try_number} ({instance.id})"


def _ended_by_earlier_try(ctx: RunContext, handle: Handle, context: Context) -> bool:
    """Whether an earlier try, which a person cleared, cancelled this attempt: then this try launches anew."""
    by = ctx.ledger.read().cancelled.get(handle.attempt, "")
    return by.startswith(f"task {context['ti'].task_id}, try ") and by != _canceller(context)
