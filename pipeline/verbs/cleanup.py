"""cleanup: end what still runs, write the report, delete what the run owns, and see that it is gone."""

import time
from collections.abc import Callable
from contextlib import suppress

from manycpu.pipeline import run_report
from manycpu.pipeline.ledger import Entry, VerbRecord
from manycpu.pipeline.run_report import Report
from manycpu.pipeline.spec.errors import ExportError, ManycpuError
from manycpu.pipeline.spec.handle import Handle
from manycpu.pipeline.spec.observed import Observed
from manycpu.pipeline.spec.state import RunState
from manycpu.pipeline.targets import verbs_of
from manycpu.pipeline.targets.attempt import attempt_status
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.targets.open_run import as_started
from manycpu.pipeline.targets.outcome import outcome
from manycpu.pipeline.tracking.ending import tell_end
from manycpu.pipeline.verbs.cancel import cancel
from manycpu.pipeline.verbs.export import unseen
from manycpu.pipeline.verbs.launch import present_handle
from manycpu.pipeline.verbs.report import report_path, write_report
from manycpu.pipeline.verbs.wait import observed_of

__all__ = ["cleanup", "undelivered"]

_VERBS = ("prepare", "stage", "build", "launch", "wait", "export")


def _tell_nobody(_: Report) -> None:
    return


def cleanup(
    ctx: RunContext,
    *,
    keep: bool = True,
    delete_model: bool = False,
    tell: Callable[[Report], object] = _tell_nobody,
) -> Report | None:
    """Delete everything of the run but its output and what later runs reuse.

    A model that was trained and could not be exported, or is not to be seen at the output, is kept for ever:
    the same run goes on from there.

    Args:
        ctx: The run.
        keep: Whether the run's ``keep`` counts.
        delete_model: Whether somebody said that this run's model may go, though it was not exported.
        tell: Is given the report before anything is deleted, and as it is in the end.

    Returns:
        The report as it was written to the output; None where the run never began or is cleaned up already.

    Raises:
        ExportError: The report cannot be written to the output.
        LaunchError: A process of the run does not end.
        ClusterError: The cluster does not answer.
    """
    if not ctx.ledger.exists():
        return None
    started = time.monotonic()
    cancel(ctx, by="cleanup")
    model = not delete_model and undelivered(ctx)
    written = _draft(ctx)
    with suppress(ExportError):  # raised below, when all else is done
        write_report(ctx, written)
    tell(written)
    entry = ctx.ledger.read()
    if model or (keep and _is_kept(ctx, written)):
        written.kept += verbs_of(ctx).keep(ctx, None if model else ctx.run.keep_for)
        result = "skipped"
    else:
        written.kept = [item for item in written.kept if not verbs_of(ctx).owns(ctx, item)]
        written.left_behind = verbs_of(ctx).remove(ctx)
        result = "failed" if written.left_behind else "done"
    # Last: one who is away is waited for, and nothing of the run has to be there for it.
    told = tell_end(ctx, entry, written, report_path(ctx))
    written.trackers, written.warnings = told.places, [*written.warnings, *told.warnings]
    seconds = time.monotonic() - started
    written.verbs["cleanup"] = VerbRecord.model_validate({"seconds": seconds, "result": result})
    tell(written)
    write_report(ctx, written)
    return written


def undelivered(ctx: RunContext) -> bool:
    """Whether the run has a model that was not exported, or cannot be seen where it was exported to.

    Where nobody has judged its training, it counts as trained.

    Raises:
        LaunchError: The training was started on another machine.
        ClusterError: The cluster does not answer.
    """
    entry = ctx.ledger.read()
    handle = present_handle(ctx, entry)
    if entry.described().fruitless:
        return False
    if entry.export is not None:
        return handle is not None and (_unasked(ctx, entry, handle) or unseen(ctx, entry, handle) is not None)
    if judged := entry.verbs.get("wait"):
        return judged.result != "failed"
    return handle is not None and attempt_status(ctx, handle, entry).state is RunState.SUCCEEDED


def _unasked(ctx: RunContext, entry: Entry, handle: Handle) -> bool:
    """Whether an attempt was to write a model, and ``output`` is null since: nobody said to delete it."""
    before = entry.described(handle.attempt).run.get("output")
    if before is None or entry.export is None or entry.export["path"] is not None:
        return False
    return verbs_of(ctx).may_have_model(ctx, handle)


def _draft(ctx: RunContext) -> Report:
    entry = ctx.ledger.read()
    handle = present_handle(ctx, entry)
    observed = observed_of(ctx, handle) if handle else Observed()
    state, error = _state(ctx, entry, handle)
    written = run_report.draft(entry, observed, state, error)
    if handle and (lack := unseen(ctx, entry, handle)):
        written.state, written.error, written.export = RunState.FAILED, lack, None
    return written


def _state(ctx: RunContext, entry: Entry, handle: Handle | None) -> tuple[RunState, str | None]:
    failed = next((record.error for record in entry.verbs.values() if record.result == "failed"), None)
    if handle is None:
        return RunState.FAILED, failed or _not_done(entry)
    try:
        status = attempt_status(ctx, handle, entry)
        judged = entry.verbs.get("wait")
        if status.state is not RunState.SUCCEEDED or judged is None or judged.result != "done":
            status = outcome(as_started(ctx, entry, handle.attempt), status, observed_of(ctx, handle))
    except ManycpuError as error:
        return RunState.FAILED, str(error)
    if status.state is not RunState.SUCCEEDED:
        return status.state, failed or "\n".join(
            str(part) for part in (status.reason, status.failure) if part
        )
    error_text = failed or _not_done(entry)
    return (RunState.FAILED, error_text) if error_text else (RunState.SUCCEEDED, None)


def _not_done(entry: Entry) -> str | None:
    # A wait that could not be recorded is judged anew: what else is done comes after it.
    missing = [verb for verb in _VERBS if verb not in entry.verbs and verb != "wait"]
    return f"{missing[0]} was not done" if missing else None


def _is_kept(ctx: RunContext, written: Report) -> bool:
    failed = written.state is not RunState.SUCCEEDED
    return ctx.run.keep == "always" or (ctx.run.keep == "on_failure" and failed)
