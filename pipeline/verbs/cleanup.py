"""cleanup: end the training, write the report, delete what the run owns, and check that it is gone."""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum

from manycpu.pipeline import run_report
from manycpu.pipeline.ledger import CLEANUP, VERBS, Entry, VerbRecord
from manycpu.pipeline.run_report import Report
from manycpu.pipeline.spec.errors import ExportError, ManycpuError, OutputTakenError
from manycpu.pipeline.spec.handle import Handle
from manycpu.pipeline.spec.naming import run_name
from manycpu.pipeline.spec.observed import Observed
from manycpu.pipeline.spec.state import RunState
from manycpu.pipeline.spec.words import first_of
from manycpu.pipeline.targets.attempt import attempt_status
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.targets.open_run import as_started
from manycpu.pipeline.targets.outcome import outcome
from manycpu.pipeline.tracking.ending import tell_end
from manycpu.pipeline.verbs.cancel import cancel
from manycpu.pipeline.verbs.export import (
    has_present_output,
    invisible_model_error,
    is_model_visible,
    why_model_invisible,
)
from manycpu.pipeline.verbs.report import log_of, read_report, report_path, write_log, write_report

_LOG = logging.getLogger(__name__)
_VERBS = tuple(verb for verb in VERBS if verb != CLEANUP)


class Remains(StrEnum):
    """What a run still holds of a training: it decides what a clean-up may delete."""

    NOTHING = "nothing"
    """Nothing was started, or the model was exported and can be seen in the output."""
    MODEL = "model"
    """The training succeeded, but its model was not exported or cannot be seen in the output."""
    RUNNING = "running"
    """The training may still run."""
    FILES = "files"
    """``run.output`` is null, and the program may have written files: they are kept for a time."""
    UNREAD = "unread"
    """What a notebook's function returned could not be read: all of the run is kept for a time."""
    FAILED = "failed"
    """The training failed by itself, or a person cancelled it: ``run.keep`` decides what is deleted."""
    UNKNOWN = "unknown"
    """The reason for the end is unknown, for example because the supervisor or the job is gone."""


def cleanup(
    ctx: RunContext,
    *,
    keep: bool = True,
    delete_model: bool = False,
    attempt: int | None = None,
    tell: Callable[[Report], object] = lambda _: None,
) -> Report | None:
    """Delete everything that the run owns, except its output and files that later runs reuse.

    The model and the checkpoints stay until the model is exported, or until a person names the run and asks
    to delete them. If the training failed by itself, or a person cancelled it, ``run.keep`` decides.

    A training that still runs is ended. Report and log are written to the output; trackers get the report.

    Args:
        ctx: The run.
        keep: Whether ``run.keep`` may keep the whole run; False: only its output and checkpoints.
        delete_model: Whether a person allowed to delete the model and the checkpoints.
        attempt: The attempt after which the run is cleaned up: if a later one has begun, nothing is ended or
            deleted. None: the present one.
        tell: Called with the report twice: before anything is deleted, and at the end.

    Returns:
        The report as it was written to the output; None: the run never began, is already cleaned up, or is
        needed by a later attempt.

    Raises:
        ExportError: The report cannot be written to the output. If another run has the output, and this run
            has failed, that is only logged.
        LaunchError: A process of the run does not end.
        UnseenError: This host cannot see whether the training runs; nothing was deleted.
        ClusterError: The cluster does not answer.
    """
    if not ctx.ledger.exists():
        return _finish_half_done_cleanup(ctx, tell)
    started = time.monotonic()
    cancel(ctx, by=CLEANUP, attempt=attempt)
    if _is_superseded(ctx, attempt):
        return None
    why_invisible = why_model_invisible(ctx, ctx.ledger.read().export)  # asked once: a pod may have to look
    left = Remains.NOTHING if delete_model else _remains(ctx, why_invisible)
    # Written before anything is deleted: once the ledger is gone, a later try reads in it what is unfinished.
    report = _draft_report(ctx, why_invisible)
    with suppress(ExportError):  # raised at the end, by the last write
        write_report(ctx, report)
    tell(report)
    entry = ctx.ledger.read()  # now: `_complete` needs it when the ledger is deleted
    handle = ctx.driver.present_handle(ctx, entry)
    log = log_of(ctx, handle) if handle else ""
    log_fault = write_log(ctx, log)
    if log_fault:  # tried again below, where it is a warning
        _LOG.info("%s", log_fault)
    if _is_superseded(ctx, attempt):  # asked again: the log may have taken minutes
        return None
    has_failed = report.state is not RunState.SUCCEEDED
    keeps_all = keep and (ctx.run.keep == "always" or (ctx.run.keep == "on_failure" and has_failed))
    kept = [] if delete_model else _keep_results(ctx, left, keeps_all=keeps_all)
    if kept:
        result = "skipped"
        report.advice = _advice_on_kept(ctx, left, kept, ctx.ledger.lease().until)
        report.kept += kept
    else:
        result = _remove(ctx, report)
    _complete(ctx, entry, report, started, result)
    tell(report)
    if log_fault:
        log_fault = write_log(ctx, log)  # a full disk may have room by now
    if log_fault:
        _LOG.warning("%s", log_fault)
    try:
        write_report(ctx, report)
    except OutputTakenError as error:
        if report.state is RunState.SUCCEEDED:
            raise
        _LOG.warning("the report of run %s is not written: %s", ctx.name, error.message)
    return report


def _is_superseded(ctx: RunContext, attempt: int | None) -> bool:
    """Whether an attempt later than ``attempt`` has begun; False if ``attempt`` is None."""
    return attempt is not None and ctx.ledger.read().attempt > attempt


def only_cleanup_is_left(ctx: RunContext, *, or_nothing: bool = False) -> bool:
    """Whether the run is exported, the model can be seen in the output, and only the clean-up is missing.

    This is so if an earlier process was killed during the clean-up: the run must not train again.

    Args:
        ctx: The run.
        or_nothing: Whether a run whose clean-up is finished counts as well.
    """
    if ctx.ledger.exists():
        entry = ctx.ledger.read()
        return _is_exported(ctx, entry, why_model_invisible(ctx, entry.export))
    return _report_without_ledger(ctx, or_finished=or_nothing) is not None


def _is_exported(ctx: RunContext, entry: Entry, why_invisible: str | None) -> bool:
    """Whether every verb before the export is done, and the exported model can be seen in the output.

    The record of the verb export does not count: it is written after the export, and that write may have
    failed. ``why_invisible``: what :func:`why_model_invisible` says.
    """
    records = [entry.verbs.get(verb) for verb in _VERBS if verb != "export"]
    done = all(record is not None and record.result != "failed" for record in records)
    return done and why_invisible is None and has_present_output(ctx, entry.export)


def _report_without_ledger(ctx: RunContext, *, or_finished: bool = False) -> Report | None:
    """Read the report of a run whose ledger is deleted, if it was exported and its clean-up is unfinished.

    Args:
        ctx: The run.
        or_finished: Whether a run whose clean-up is finished counts as well.

    Returns:
        The report; None: the run is in another state, or its report or its model cannot be seen.
    """
    try:
        report = read_report(ctx)
    except ManycpuError:
        return None
    cleanup_record = report.verbs.get(CLEANUP)
    is_finished = cleanup_record is not None and cleanup_record.result != "failed"
    if is_finished and not or_finished:
        return None
    # The name becomes part of a path that is deleted: an edited report must not choose another path. From the
    # label in a valid name, run_name() makes the same name again.
    is_name_valid = report.name == run_name(report.name.removesuffix(ctx.key), ctx.key)
    if not is_name_valid or report.state is not RunState.SUCCEEDED:
        return None
    # The ledger is gone, and the run's own copy with it: a file that a person edits since is no fault.
    return report if is_model_visible(ctx, report.export, sizes=False) else None


def _finish_half_done_cleanup(ctx: RunContext, tell: Callable[[Report], object]) -> Report | None:
    """Finish the clean-up of a run if an earlier process was killed after it had deleted the ledger.

    Returns the report; None: the run has no clean-up to finish.
    """
    started = time.monotonic()
    report = _report_without_ledger(ctx)
    if report is None:
        return None
    ctx = replace(ctx, name=report.name)  # the run may have begun under another name
    result = _remove(ctx, report)
    entry = None  # what trackers need of the deleted ledger
    if report.began is not None:  # else an older version wrote the report: trackers receive nothing
        update = {"attempt": report.attempts, "digests": report.digests, "image": report.image}
        entry = ctx.new_entry(report.began).model_copy(update=update)
    _complete(ctx, entry, report, started, result)
    tell(report)
    write_report(ctx, report)
    return report


def _remove(ctx: RunContext, report: Report) -> str:
    """Delete what the run owns, and record that in the report.

    Paths that the run owns are removed from the report's list ``kept``. What could not be deleted becomes the
    report's ``left_behind``. Returns the result of the verb cleanup: ``done``, or ``failed`` if something is
    left.
    """
    report.kept = [item for item in report.kept if not ctx.driver.owns(ctx, item)]
    report.left_behind = ctx.driver.remove(ctx)
    return "failed" if report.left_behind else "done"


def _complete(ctx: RunContext, entry: Entry | None, report: Report, started: float, result: str) -> None:
    """Send the report to the run's trackers, and add their answers and the verb cleanup to the report.

    Called after the deletion, because a tracker may answer late.

    Args:
        ctx: The run.
        entry: The ledger's entry, read before the deletion; None: no tracker gets the report.
        report: The report, which is changed.
        started: When the clean-up began, by ``time.monotonic()``.
        result: The result of the verb cleanup.
    """
    if entry is not None:
        delivered = tell_end(ctx, entry, report, report_path(ctx))
        report.trackers, report.warnings = delivered.places, [*report.warnings, *delivered.warnings]
    seconds = time.monotonic() - started
    report.verbs[CLEANUP] = VerbRecord.model_validate({"seconds": seconds, "result": result})


def remains(ctx: RunContext) -> Remains:
    """Find out what the run still holds of a training, from its ledger and the state of its attempt.

    Raises:
        ClusterError: The cluster does not answer.
    """
    return _remains(ctx, why_model_invisible(ctx, ctx.ledger.read().export))


def _remains(ctx: RunContext, why_invisible: str | None) -> Remains:
    """Find out what the run still holds of a training; ``why_invisible``: what why_model_invisible() says."""
    entry = ctx.ledger.read()
    if entry.attempt == 0:  # nothing was launched
        return Remains.NOTHING
    handle = ctx.driver.present_handle(ctx, entry)
    if entry.described().fruitless:  # the program may have written its model elsewhere in the run's folder
        has_strays = handle is not None and ctx.driver.strays(ctx, entry, handle)
        return Remains.MODEL if has_strays else Remains.FAILED
    if entry.export is not None:
        return _remains_after_export(ctx, entry, handle, why_invisible)
    # A success that `wait` recorded, without an export: the model is still here.
    wait_record = entry.verbs.get("wait")
    if wait_record is not None and wait_record.result != "failed":
        return Remains.MODEL
    return Remains.UNKNOWN if handle is None else _remains_of_attempt(ctx, entry, handle)


def _remains_after_export(
    ctx: RunContext, entry: Entry, handle: Handle | None, why_invisible: str | None
) -> Remains:
    """Find out what a run holds of an attempt whose export is recorded; ``run.output`` may have been null."""
    output_lacks_model = handle is not None and (
        _output_was_dropped(ctx, entry, handle) or why_invisible is not None
    )
    if output_lacks_model:
        return Remains.MODEL
    if entry.returned == "unread":
        return Remains.UNREAD
    if handle is not None and _wrote_without_output(ctx, entry, handle):
        return Remains.FILES
    return Remains.NOTHING


def _remains_of_attempt(ctx: RunContext, entry: Entry, handle: Handle) -> Remains:
    """Find out what a run holds of an attempt from the attempt's state; no verb has recorded a success."""
    status = attempt_status(ctx, handle, entry)
    if not status.state.terminal:
        return Remains.RUNNING
    if status.state is RunState.SUCCEEDED:
        return Remains.MODEL
    by_a_person = entry.cancelled_by_person(handle.attempt)
    return Remains.FAILED if status.by_itself or by_a_person else Remains.UNKNOWN


def may_delete_expired(ctx: RunContext) -> bool:
    """Whether a run with an expired lease may be deleted; if it must be kept, record for how long.

    If another process resumes the run meanwhile, the lease stays as it is.

    Raises:
        BadInputError: The hostfile of the run cannot be read.
        ClusterError: The cluster does not answer.
    """
    left = remains(ctx)
    if left in (Remains.MODEL, Remains.UNKNOWN):
        ctx.ledger.keep(seconds=None, only_over=True)  # without a time limit
        return False
    # Not kept yet: its process was killed before the clean-up, so the keep time begins now. If the lease is
    # `kept`, this time is over.
    if _is_kept_for_a_time(ctx, left) and not ctx.ledger.lease().kept:
        ctx.ledger.keep(ctx.run.keep_for, only_over=True)
        return False
    return left is not Remains.RUNNING


def _is_kept_for_a_time(ctx: RunContext, left: Remains) -> bool:
    """Whether a run that still holds ``left`` is kept for ``run.keep_for``."""
    has_results = left in (Remains.FAILED, Remains.FILES) and ctx.run.keep != "never"
    return has_results or left is Remains.UNREAD


def _keep_results(ctx: RunContext, left: Remains, *, keeps_all: bool) -> list[str]:
    """Keep the whole run or its results if a clean-up must not delete them, and delete the rest.

    Args:
        ctx: The run.
        left: What the run still holds of a training.
        keeps_all: Whether ``run.keep`` keeps the whole run, not only output and checkpoints.

    Returns:
        The names of what is kept; empty: the run may be deleted, and nothing was deleted yet.
    """
    driver = ctx.driver
    if left in (Remains.MODEL, Remains.RUNNING):
        return driver.keep(ctx, seconds=None)  # without a time limit
    if left is Remains.UNKNOWN:
        return driver.keep(ctx, seconds=None) if keeps_all else driver.keep_results(ctx, seconds=None)
    lease = ctx.ledger.lease()
    has_expired = lease.no_longer_kept(ctx.ledger.now())  # it was kept, for a time that is over
    if keeps_all or (left is Remains.UNREAD and not has_expired):
        return driver.keep(ctx, ctx.run.keep_for)
    if _is_kept_for_a_time(ctx, left) and not has_expired:
        return driver.keep_results(ctx, ctx.run.keep_for, checkpoints=left is Remains.FAILED)
    return []


def _advice_on_kept(ctx: RunContext, left: Remains, kept: list[str], until: float | None) -> str:
    """Say what is kept, until when, what the same run does with it, and what deletes it.

    ``until``: seconds since the epoch; None: without a time limit.
    """
    date = "" if until is None else time.strftime(" until %Y-%m-%d %H:%M UTC", time.gmtime(until))
    if left is Remains.NOTHING:  # all that the training wrote is exported, or it wrote nothing
        return f"All of the run is kept{date} in {first_of(kept)}; `{ctx.deletion}` deletes it"
    what = {
        Remains.MODEL: "A trained model that was not exported is kept",
        Remains.RUNNING: "The training may still run, and all of it is kept",
        Remains.UNKNOWN: "Nothing shows why the training ended: its output and checkpoints are kept",
        Remains.UNREAD: "What the function returned could not be read, and all of the run is kept",
        Remains.FAILED: "Its output and checkpoints are kept",
        Remains.FILES: "run.output is null, and what the program wrote is kept",
    }[left]
    effects = {Remains.FILES: "with an output exports it", Remains.UNREAD: "reads it again"}
    effect = effects.get(left, "continues from there")
    if left is Remains.MODEL and ctx.ledger.read().described().fruitless:
        what, effect = "Files that the program wrote outside of its output are kept", "trains again"
    again = f"--run-id {ctx.run_id}" if ctx.run_id else "its --run-id, or its task cleared"
    return f"{what}{date} in {first_of(kept)}. The same run ({again}) {effect}; `{ctx.deletion}` deletes it"


def _wrote_without_output(ctx: RunContext, entry: Entry, handle: Handle) -> bool:
    """Whether the program may have written files of a run whose ``run.output`` is null."""
    if ctx.run.output is not None:
        return False
    return ctx.driver.may_have_model(ctx, handle) or bool(ctx.driver.strays(ctx, entry, handle))


def _output_was_dropped(ctx: RunContext, entry: Entry, handle: Handle) -> bool:
    """Whether a model may not have been exported because ``run.output`` became null after the launch."""
    output_at_launch = entry.described(handle.attempt).run.get("output")
    if output_at_launch is None or entry.export is None or entry.export["path"] is not None:
        return False  # it never had an output, or was exported to one
    return ctx.driver.may_have_model(ctx, handle)


def _draft_report(ctx: RunContext, why_invisible: str | None) -> Report:
    """Build the report before anything is deleted; a model that cannot be seen in the output is a failure.

    ``why_invisible``: what :func:`why_model_invisible` says.
    """
    entry = ctx.ledger.read()
    handle = ctx.driver.present_handle(ctx, entry)
    observed = ctx.driver.observed_of(ctx, handle) if handle else Observed()
    state, error = _state_and_error(ctx, entry, handle, why_invisible)
    report = run_report.draft(entry, observed, state, error)
    if handle and why_invisible:
        report.state, report.export = RunState.FAILED, None
        report.error = invisible_model_error(ctx, handle, why_invisible)
    return report


def _state_and_error(
    ctx: RunContext, entry: Entry, handle: Handle | None, why_invisible: str | None
) -> tuple[RunState, str | None]:
    """Return the final state of a run, and the error that made it fail; None: it succeeded.

    The error of the first verb that failed counts most, then a bad end of the attempt, then a missing verb.
    """
    if _is_exported(ctx, entry, why_invisible):  # even if the evidence of the end is deleted already
        return RunState.SUCCEEDED, None
    records = [entry.verbs[verb] for verb in _VERBS if verb in entry.verbs]
    failed = next((record for record in records if record.result == "failed"), None)
    error = failed and failed.error
    # Except `wait`: if its record is missing, the attempt is judged below.
    missing = [verb for verb in _VERBS if verb not in entry.verbs and verb != "wait"]
    error_of_verbs = error or (f"{missing[0]} was not done" if missing else None)
    if failed and failed.cancelled:  # a person prevented the launch of the next attempt
        return RunState.CANCELLED, error_of_verbs
    if handle is None:
        return RunState.FAILED, error_of_verbs
    try:
        status = attempt_status(ctx, handle, entry)
        wait_record = entry.verbs.get("wait")
        wait_saw_success = wait_record is not None and wait_record.result == "done"
        # outcome() checks the proof of scale, unless `wait` did so and saw a success. To a failure, it adds
        # the first rank that failed.
        if status.state is not RunState.SUCCEEDED or not wait_saw_success:
            started_with = as_started(ctx, entry, handle.attempt)
            status = outcome(started_with, status, ctx.driver.observed_of(ctx, handle))
    except ManycpuError as unreadable:
        return RunState.FAILED, str(unreadable)
    if status.state is not RunState.SUCCEEDED:
        parts = [str(part) for part in (status.reason, status.failure) if part]
        return status.state, error or "\n".join(parts)
    return RunState.FAILED if error_of_verbs else RunState.SUCCEEDED, error_of_verbs
