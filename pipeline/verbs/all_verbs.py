"""Run all verbs of a run, one after the other. `manycpu run` and notebooks call this module."""

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from manycpu.pipeline.adapters import process
from manycpu.pipeline.listeners import Guarded, RunListener, Silent
from manycpu.pipeline.run_report import Report
from manycpu.pipeline.spec.errors import (
    BadInputError,
    CancelledError,
    Finding,
    ManycpuError,
    RunGoneError,
    raise_findings,
)
from manycpu.pipeline.spec.handle import Handle
from manycpu.pipeline.spec.state import RunState
from manycpu.pipeline.spec.targets import Target
from manycpu.pipeline.spec.training_run import TrainingRun
from manycpu.pipeline.targets.attempt import attempt_status
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.targets.open_run import find, open_context
from manycpu.pipeline.tracking.live import listeners as trackers
from manycpu.pipeline.verbs.build import build
from manycpu.pipeline.verbs.cancel import cancel
from manycpu.pipeline.verbs.cleanup import cleanup, only_cleanup_is_left
from manycpu.pipeline.verbs.export import export
from manycpu.pipeline.verbs.launch import attach, edited, launch
from manycpu.pipeline.verbs.prepare import SOURCES, prepare
from manycpu.pipeline.verbs.report import conclude as conclude_run
from manycpu.pipeline.verbs.report import read_report, remember, report_path
from manycpu.pipeline.verbs.stage import stage
from manycpu.pipeline.verbs.wait import conclude, wait

_LOG = logging.getLogger(__name__)
Trained = Callable[[Handle], bool]
"""Called with the handle of the attempt that succeeded.

Returns whether the caller could read what the function of a notebook returned in that attempt.
"""


def train(
    run: TrainingRun | Mapping[str, Any],
    target: Target | Mapping[str, Any] | None = None,
    *,
    run_id: str | None = None,
    base: Path | None = None,
    listener: RunListener | None = None,
) -> Report:
    """Run all verbs of a training: prepare, stage, build, launch, wait, export and clean up.

    In a DAG each verb is a task. :class:`manycpu.operators.TrainOperator` runs only launch and wait.

    Args:
        run: What to train.
        target: Where to train; None: this machine.
        run_id: Tells this run from others; a call with the same run id resumes the run. None: a new run.
        base: Folder that relative paths start from; None: the current directory.
        listener: Receives the progress of the run. If it raises an error, it is dropped; the run continues.

    Returns:
        The content of report.json, which is beside the exported model.

    Raises:
        BadInputError: A field is wrong; nothing was started.
        ManycpuError: A verb failed; the report contains the error too.
    """
    # Identified as on the command line: the same run id there is the same run.
    ctx = open_context(run, target, "cli", run_id or new_run_id(), base=base or Path.cwd())
    ctx = find(ctx) if run_id else ctx  # a run that began before may have another name
    with letting_go_after_errors(ctx):
        return run_all(ctx, listener or Silent())


def new_run_id() -> str:
    """Generate a run id: the local time and a random suffix."""
    return f"{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(3)}"


@contextmanager
def letting_go_after_errors(ctx: RunContext) -> Iterator[None]:
    """If the block raises, end the lease that this process holds, and raise the error again.

    The process of a notebook lives on after an error, and would keep the lease.
    """
    try:
        yield
    except BaseException:
        with suppress(OSError, ManycpuError):  # the first error says more
            holder = ctx.ledger.lease().holder
            if holder is not None and process.is_this_process(holder):
                ctx.ledger.change_lease(ended=True, holder=None)
        raise


def run_all(ctx: RunContext, listener: RunListener, trained: Trained | None = None) -> Report:
    """Run all verbs of a run, from prepare to the clean-up, and return the report.

    If a verb fails while the training may still run, the training continues. A later call with the same run
    id attaches to it. A person can end it, by Ctrl-C or ``manycpu cancel``.

    Args:
        ctx: The run.
        listener: Receives the progress of the run.
        trained: Called when the attempt has succeeded, before anything of it is deleted; also if an earlier
            process has trained it. If it returns False, all of the run is kept for ``keep_for``.

    Raises:
        BadInputError: A field is wrong. Or the run has trained and is kept, and an earlier call has read what
            its function returned.
        ForeignRunError: Another process runs all verbs of this run, or may do so; nothing was changed.
        ManycpuError: A verb failed.
    """
    listener = Guarded(listener)
    begun_before = ctx.ledger.exists()
    if begun_before:
        ctx.ledger.refuse_second_holder()
    if only_cleanup_is_left(ctx):
        return _only_clean_up(ctx, listener, trained)
    # This process is the holder of the run: if it is killed, its death frees the lease at once. A holder
    # needs no folder and no attempt.
    holder = process.handle_of_this_process(Path(), ctx.name, attempt=0)
    try:
        with _reporting(listener, "prepare"):
            findings = prepare(ctx, holder)
            for finding in findings:
                if not finding.fatal:  # a fatal one counts only if `_stage_to_wait` cannot attach
                    listener.finding(finding)
            if not begun_before:
                _warn_of_second_training(ctx, listener)
    except KeyboardInterrupt as interrupt:
        # A run that began earlier stays, for the next try.
        if not begun_before:
            # Another process may have begun this run in the meantime: then that process cleans it up. Without
            # a ledger there is no lease to ask.
            exists = ctx.ledger.exists()
            if not exists or ctx.ledger.lease().held_by_another(ctx.ledger.now()) is False:
                _clean_up(ctx)
        raise CancelledError("interrupted; nothing was launched") from interrupt
    with _naming_what_stays(ctx):
        return _after_prepare(ctx, listener, findings, trained)


def _warn_of_second_training(ctx: RunContext, listener: RunListener) -> None:
    """Warn if a run that begins now has succeeded before: it would train again, and replace the model.

    The user may not know of the success: the terminal may have been closed before the end.
    """
    with suppress(ManycpuError):  # it has no report
        if read_report(ctx).state is RunState.SUCCEEDED:
            message = "the run with this id has succeeded before: it trains again, and replaces the model"
            fix = "To keep the model, press Ctrl-C"
            listener.finding(Finding("run_id", message, fix, fatal=False))


def _only_clean_up(ctx: RunContext, listener: RunListener, trained: Trained | None) -> Report:
    """Clean up a run that an earlier process has trained and exported, and return the report.

    Raises:
        BadInputError: The run was cleaned up and is kept, and an earlier call has read what its function
            returned.
    """
    entry = ctx.ledger.read() if ctx.ledger.exists() else None
    if entry is not None and entry.returned == "read" and ctx.ledger.lease().kept:
        fix = f"Give another run_id, or remove what is kept of the run: `{ctx.deletion}`"
        raise BadInputError(f"run {ctx.name} has trained already", field="run_id", fix=fix)
    _LOG.warning("run %s has trained already, and is only cleaned up now", ctx.name)
    with _naming_what_stays(ctx):
        handle = None if entry is None else ctx.driver.present_handle(ctx, entry)
        if handle is not None:
            _tell_trained(ctx, handle, trained)
        return _end(ctx, listener, failure=None)


@contextmanager
def _naming_what_stays(ctx: RunContext) -> Iterator[None]:
    """Turn a Ctrl-C in the block into a CancelledError that names what stays of the run.

    No clean-up follows. If the ledger is gone already, the error refers to the report instead.
    """
    try:
        yield
    except KeyboardInterrupt as again:
        is_gone = False
        with suppress(ManycpuError):  # the cluster does not answer
            is_gone = not ctx.ledger.exists()
        fix = "See its report" if is_gone else _what_stays(ctx)
        raise CancelledError("interrupted while it cleaned up", fix=fix) from again


def _after_prepare(
    ctx: RunContext, listener: RunListener, findings: Sequence[Finding], trained: Trained | None
) -> Report:
    """Run the verbs from stage to export, then clean up and return the report.

    There is no clean-up after an error of a verb if the training may still run, or if the run is gone. After
    a Ctrl-C there is always one, and it ends the training.
    """
    failure: BaseException | None = None
    try:
        handle = _stage_to_wait(ctx, listener, findings)
        _tell_trained(ctx, handle, trained)
        with _reporting(listener, "export"):
            export(ctx, handle, listener.progress)
    except BaseException as error:  # noqa: BLE001 - raised below, after the clean-up or with a note
        failure = error
    if failure is not None and not isinstance(failure, KeyboardInterrupt):
        if isinstance(failure, RunGoneError) and not ctx.ledger.exists():
            raise failure  # nothing is left to clean up, nor to report on
        if _may_still_train(ctx):
            follow, cancelling = ctx.typed("logs", "--follow"), ctx.typed("cancel")
            failure.add_note(
                f"The training of run {ctx.name} may still run, and was left as it is, in {ctx.where}: "
                f"the same run id attaches to it, `{follow}` shows it, `{cancelling}` ends it."
            )
            raise failure
    return _end(ctx, listener, failure)


def _end(ctx: RunContext, listener: RunListener, failure: BaseException | None) -> Report:
    """Clean up, and then return the report or raise an error.

    Args:
        ctx: The run.
        listener: Receives the clean-up and the report.
        failure: What a verb raised: it is raised again, with the report's advice. A KeyboardInterrupt becomes
            a CancelledError. Another failure is only logged if the run has succeeded in spite of it. None:
            no verb failed, and an error is raised only if the report records one.
    """
    interrupted = isinstance(failure, KeyboardInterrupt)
    try:
        with _reporting(listener, "cleanup"):
            report = _clean_up(ctx, by="the terminal" if interrupted else None)
            if report is None:  # an earlier process has cleaned up
                report = read_report(ctx)
                remember(ctx)
    except Exception as error:
        if interrupted and ctx.ledger.exists():
            error.add_note(_what_stays(ctx))
        raise error from failure
    listener.report(report, report_path(ctx))
    if interrupted:  # raise an error of manycpu's in place of the Ctrl-C, which becomes its cause
        interrupt = failure
        if report.state is RunState.CANCELLED:
            failure = CancelledError("interrupted; the training was ended")
        else:  # such as before its launch, or during the export
            failure = CancelledError("interrupted", fix="See its report")
        failure.__cause__ = interrupt
    if failure is not None and not interrupted and report.state is RunState.SUCCEEDED:
        _LOG.warning("the run has succeeded in spite of this error: %s", failure)
        failure = None
    if failure is not None:
        if report.advice:
            failure.add_note(report.advice)
        raise failure
    return conclude_run(report)


def _may_still_train(ctx: RunContext) -> bool:
    """Whether the present attempt may still run; True also if its state cannot be read."""
    try:
        entry = ctx.ledger.read()
        handle = ctx.driver.present_handle(ctx, entry)
        if handle is None or "wait" in entry.verbs:  # it never started, or `wait` saw its end
            return False
        return not attempt_status(ctx, handle, entry).state.terminal
    except Exception:  # noqa: BLE001 - after any error, the attempt may run
        return True


def _what_stays(ctx: RunContext) -> str:
    """Describe what an interrupted clean-up leaves, and the commands that end or remove it."""
    training, how_to_end = "", ""
    if _may_still_train(ctx):
        training, how_to_end = "its training may still run, and ", f"`{ctx.typed('cancel')}` ends it, "
    return (
        f"Of run {ctx.name}, {training}all it has in {ctx.where} stays: the same run id continues it, "
        f"{how_to_end}`{ctx.deletion}` removes it"
    )


def _clean_up(ctx: RunContext, by: str | None = None) -> Report | None:
    """Clean up the run. A first Ctrl-C during the clean-up starts it again, a second one stops it.

    Args:
        ctx: The run.
        by: Who cancels the training before the clean-up, as the ledger records it; None: the training is not
            cancelled before.

    Returns:
        The report; None: an earlier process has already cleaned up the run.
    """

    def cancel_and_clean_up() -> Report | None:
        if by is not None:
            cancel(ctx, by=by)
        # `remember` comes before the last write of the report. If this process is killed before that write,
        # the same run id finishes the clean-up; after it, the same run id would train again.
        return cleanup(ctx, tell=lambda _: remember(ctx))

    try:
        if by is not None:
            _LOG.warning("interrupted: ending the training, and cleaning up")
        return cancel_and_clean_up()
    except KeyboardInterrupt:
        _LOG.warning("interrupted again: once more leaves everything as it is")
        return cancel_and_clean_up()


def _tell_trained(ctx: RunContext, handle: Handle, trained: Trained | None) -> None:
    """Call ``trained``, if it is given, and record its answer: the clean-up needs it to decide what to keep.

    ``handle``: the attempt that succeeded.
    """
    if trained is None:
        return
    is_read = trained(handle)
    with ctx.ledger.update() as entry:
        entry.returned = "read" if is_read else "unread"
    if not is_read:
        # Start the keep time again: the next clean-up keeps the run for the full `keep_for`.
        ctx.ledger.take_up()


def _stage_to_wait(ctx: RunContext, listener: RunListener, findings: Sequence[Finding]) -> Handle:
    """Run the verbs stage, build, launch and wait; return the handle of the attempt, which succeeded.

    If a source cannot be read any more, attach to the present attempt, provided that it runs or has
    succeeded. A failed stage or build is then recorded as skipped.
    """
    present: Handle | None = None
    try:
        raise_findings(findings)
        with _reporting(listener, "stage"):
            staged = stage(ctx, listener.progress)
        with _reporting(listener, "build"):
            built = build(ctx)
    except ManycpuError as error:
        # `prepare` lets fatal findings through only if they are of sources.
        is_of_source = error.field in SOURCES or any(finding.fatal for finding in findings)
        present = attach(ctx) if is_of_source else None
        if present is None:
            raise
        _LOG.warning("%s", error)
        with ctx.ledger.update() as entry:
            for verb in {"stage", "build"} & entry.verbs.keys():
                record = entry.verbs[verb]
                if record.result == "failed":  # its error would become that of the run, in the report
                    record.result, record.error = "skipped", None
    with _reporting(listener, "launch"):
        if present is not None:
            handle, attached = present, True
        else:
            handle, attached = launch(ctx, staged, built)
        if attached and _may_still_train(ctx):
            message = "attached to attempt %d, whose training went on without the command that started it"
            _LOG.info(message, handle.attempt)
        elif attached:
            _LOG.info("attempt %d has trained already: its log is repeated", handle.attempt)
        if finding := edited(ctx, handle):
            listener.finding(finding)
    with _reporting(listener, "wait"):
        guarded_trackers = [Guarded(tracker) for tracker in trackers(ctx, handle)]
        with ctx.ledger.kept_alive(ctx.waiting_lease):
            status = wait(ctx, handle, listener, *guarded_trackers)
        conclude(ctx, handle, status)
    return handle


@contextmanager
def _reporting(listener: RunListener, verb: str) -> Iterator[None]:
    """Report a verb to the listener: that it begins; after the block, its seconds, and "done" or "failed"."""
    listener.begin(verb)
    started, result = time.monotonic(), "failed"
    try:
        yield
        result = "done"
    finally:
        listener.end(verb, time.monotonic() - started, result)
