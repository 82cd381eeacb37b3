"""cleanup: end the training, write the report, delete what the run owns, and check that it is gone."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum

from manycpu.pipeline import run_report
from manycpu.pipeline.ledger import CLEANUP, Entry, VerbRecord
from manycpu.pipeline.run_report import Report
from manycpu.pipeline.spec.errors import ExportError, ManycpuError
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
from manycpu.pipeline.verbs.export import seen, unseen
from manycpu.pipeline.verbs.report import read_report, report_path, write_report

_VERBS = ("prepare", "stage", "build", "launch", "wait", "export")


class Remains(StrEnum):
    """What a run still holds of a training: it decides what a clean-up may delete."""

    NOTHING = "nothing"
    """Nothing was started, or the model was exported and can be seen in the output."""
    MODEL = "model"
    """The training succeeded, but its model was not exported or cannot be seen in the output."""
    RUNNING = "running"
    """The training may still run."""
    FAILED = "failed"
    """The training failed by itself, or a person cancelled it: ``run.keep`` decides what is deleted."""
    UNKNOWN = "unknown"
    """The reason for the end is unknown, for example because the supervisor or the job is gone."""


def cleanup(
    ctx: RunContext,
    *,
    keep: bool = True,
    delete_model: bool = False,
    tell: Callable[[Report], object] = lambda _: None,
) -> Report | None:
    """Delete everything that the run owns, except its output and files that later runs reuse.

    The model and the checkpoints stay until the model is exported, or until a person names the run and asks
    to delete them. If the training failed by itself, or a person cancelled it, ``run.keep`` decides.

    Args:
        ctx: The run.
        keep: Whether to obey a ``run.keep`` that keeps the whole run, not only output and checkpoints.
        delete_model: Whether a person allowed to delete the model and the checkpoints.
        tell: Called with the report twice: before anything is deleted, and at the end.

    Returns:
        The report as it was written to the output; None: the run never began, or is already cleaned up.

    Raises:
        ExportError: The report cannot be written to the output.
        LaunchError: A process of the run does not end.
        UnseenError: This host cannot see whether the training runs; nothing was deleted.
        ClusterError: The cluster does not answer.
    """
    if not ctx.ledger.exists():
        return _finish(ctx)
    started = time.monotonic()
    cancel(ctx, by=CLEANUP)
    left = Remains.NOTHING if delete_model else remains(ctx)
    written = _draft(ctx)
    with suppress(ExportError):  # raised at the end, by the last write
        write_report(ctx, written)
    tell(written)
    entry = ctx.ledger.read()
    failed = written.state is not RunState.SUCCEEDED
    whole = keep and (ctx.run.keep == "always" or (ctx.run.keep == "on_failure" and failed))
    if kept := [] if delete_model else _keep(ctx, left, whole):
        result, until = "skipped", ctx.ledger.lease().until
        written.advice = _advice(ctx, left, kept, until)
        written.kept += kept
    else:
        result = _remove(ctx, written)
    _complete(ctx, entry, written, started, result)
    tell(written)
    write_report(ctx, written)
    return written


def only_cleanup_is_left(ctx: RunContext) -> bool:
    """Whether the run is exported, the model can be seen in the output, and only the clean-up is missing.

    This is so if an earlier process was killed during the clean-up: the run must not train again.
    """
    if ctx.ledger.exists():
        return _is_exported(ctx, ctx.ledger.read())
    return _half_cleaned(ctx) is not None


def _is_exported(ctx: RunContext, entry: Entry) -> bool:
    records = [entry.verbs.get(verb) for verb in _VERBS]
    done = all(record is not None and record.result != "failed" for record in records)
    return done and seen(ctx, entry.export)


def _half_cleaned(ctx: RunContext) -> Report | None:
    """Read the report of a run whose ledger is gone but whose clean-up is unfinished; None: no such run."""
    try:
        written = read_report(ctx)
    except ManycpuError:
        return None
    record = written.verbs.get(CLEANUP)
    unfinished = record is None or record.result == "failed"
    is_named = written.name == run_name(written.name.removesuffix(ctx.key), ctx.key)  # used as a path
    is_half = is_named and written.state is RunState.SUCCEEDED and unfinished and seen(ctx, written.export)
    return written if is_half else None


def _finish(ctx: RunContext) -> Report | None:
    """Finish the clean-up of an exported run; None: there is no unfinished one."""
    started, written = time.monotonic(), _half_cleaned(ctx)
    if written is None:
        return None
    ctx = replace(ctx, name=written.name)  # the run may have begun under another name
    result = _remove(ctx, written)
    entry = None
    if written.began is not None:  # None: an older version wrote the report
        update = {"attempt": written.attempts, "digests": written.digests, "image": written.image}
        entry = ctx.new_entry(written.began).model_copy(update=update)
    _complete(ctx, entry, written, started, result)
    write_report(ctx, written)
    return written


def _remove(ctx: RunContext, written: Report) -> str:
    """Delete what the run owns, list in the report what is left, and return the result of the verb."""
    written.kept = [item for item in written.kept if not ctx.driver.owns(ctx, item)]
    written.left_behind = ctx.driver.remove(ctx)
    return "failed" if written.left_behind else "done"


def _complete(ctx: RunContext, entry: Entry | None, written: Report, started: float, result: str) -> None:
    """Complete the report: send it to the run's trackers, and record the clean-up.

    This comes last, because a tracker that does not answer is waited for; it needs nothing that was deleted.
    """
    if entry is not None:
        delivered = tell_end(ctx, entry, written, report_path(ctx))
        written.trackers, written.warnings = delivered.places, [*written.warnings, *delivered.warnings]
    seconds = time.monotonic() - started
    written.verbs[CLEANUP] = VerbRecord.model_validate({"seconds": seconds, "result": result})


def remains(ctx: RunContext) -> Remains:
    """Determine what the run still holds of a training, from its ledger and the end of its present attempt.

    Raises:
        ClusterError: The cluster does not answer.
    """
    entry = ctx.ledger.read()
    if entry.attempt == 0:
        return Remains.NOTHING
    handle = ctx.driver.present_handle(ctx, entry)
    if entry.described().fruitless:  # the program may have written its model elsewhere in the run's folder
        stray = handle is not None and ctx.driver.strays(ctx, entry, handle)
        return Remains.MODEL if stray else Remains.FAILED
    if entry.export is not None:
        lost = handle is not None and (_unasked(ctx, entry, handle) or unseen(ctx, entry, handle) is not None)
        return Remains.MODEL if lost else Remains.NOTHING
    judged = entry.verbs.get("wait")
    if judged is not None and judged.result != "failed":
        return Remains.MODEL
    return Remains.UNKNOWN if handle is None else _how_it_ended(ctx, entry, handle)


def _how_it_ended(ctx: RunContext, entry: Entry, handle: Handle) -> Remains:
    status = attempt_status(ctx, handle, entry)
    if not status.state.terminal:
        return Remains.RUNNING
    if status.state is RunState.SUCCEEDED:
        return Remains.MODEL
    by_a_person = entry.cancelled_by_person(handle.attempt)
    return Remains.FAILED if status.by_itself or by_a_person else Remains.UNKNOWN


def end_expired(ctx: RunContext) -> bool:
    """Whether a run with an expired lease may be deleted; if it must be kept, record for how long.

    Raises:
        BadInputError: The hostfile of the run cannot be read.
        ClusterError: The cluster does not answer.
    """
    left = remains(ctx)
    if left in (Remains.MODEL, Remains.UNKNOWN):
        ctx.ledger.keep(None)
        return False
    if left is Remains.FAILED and ctx.run.keep != "never" and not ctx.ledger.lease().kept:
        ctx.ledger.keep(ctx.run.keep_for)  # its process was killed before the clean-up
        return False
    return left is not Remains.RUNNING


def _keep(ctx: RunContext, left: Remains, whole: bool) -> list[str]:
    """Keep what a clean-up must not delete; return the names of what is kept, empty if nothing is."""
    target = ctx.driver
    if left in (Remains.MODEL, Remains.RUNNING):
        return target.keep(ctx, None)
    if left is Remains.UNKNOWN:
        return target.keep(ctx, None) if whole else target.keep_results(ctx, None)
    if whole:
        return target.keep(ctx, ctx.run.keep_for)
    lease = ctx.ledger.lease()
    is_over = lease.kept and lease.over(ctx.ledger.now())
    if left is Remains.FAILED and ctx.run.keep != "never" and not is_over:
        return target.keep_results(ctx, ctx.run.keep_for)
    return []


def _advice(ctx: RunContext, left: Remains, kept: list[str], until: float | None) -> str | None:
    """Say what is kept, until when, how to resume the run, and what deletes it; None: it succeeded."""
    if left is Remains.NOTHING:
        return None
    what = {
        Remains.MODEL: "A trained model that was not exported is kept",
        Remains.RUNNING: "The training may still run, and all of it is kept",
        Remains.UNKNOWN: "Nothing shows why the training ended: its output and checkpoints are kept",
        Remains.FAILED: "Its output and checkpoints are kept",
    }[left]
    again = "continues from there"
    if left is Remains.MODEL and ctx.ledger.read().described().fruitless:
        what, again = "Files that the program wrote outside of its output are kept", "trains again"
    date = "" if until is None else time.strftime(" until %Y-%m-%d %H:%M UTC", time.gmtime(until))
    return (
        f"{what}{date} in {first_of(kept)}. The same run (its --run-id, or its task cleared) {again}; "
        f"`{ctx.deletion}` deletes it"
    )


def _unasked(ctx: RunContext, entry: Entry, handle: Handle) -> bool:
    """Whether ``run.output`` became null after launch, while the attempt may have a model: keep the model."""
    before = entry.described(handle.attempt).run.get("output")
    if before is None or entry.export is None or entry.export["path"] is not None:
        return False
    return ctx.driver.may_have_model(ctx, handle)


def _draft(ctx: RunContext) -> Report:
    entry = ctx.ledger.read()
    handle = ctx.driver.present_handle(ctx, entry)
    observed = ctx.driver.observed_of(ctx, handle) if handle else Observed()
    state, error = _state(ctx, entry, handle)
    written = run_report.draft(entry, observed, state, error)
    if handle and (lack := unseen(ctx, entry, handle)):
        written.state, written.error, written.export = RunState.FAILED, lack, None
    return written


def _state(ctx: RunContext, entry: Entry, handle: Handle | None) -> tuple[RunState, str | None]:
    if _is_exported(ctx, entry):  # even if the evidence of the end is deleted already
        return RunState.SUCCEEDED, None
    failed = next((record.error for record in entry.verbs.values() if record.result == "failed"), None)
    if handle is None:
        return RunState.FAILED, failed or _not_done(entry)
    try:
        status = attempt_status(ctx, handle, entry)
        judged = entry.verbs.get("wait")
        if status.state is not RunState.SUCCEEDED or judged is None or judged.result != "done":
            status = outcome(
                as_started(ctx, entry, handle.attempt), status, ctx.driver.observed_of(ctx, handle)
            )
    except ManycpuError as error:
        return RunState.FAILED, str(error)
    if status.state is not RunState.SUCCEEDED:
        return status.state, failed or "\n".join(
            str(part) for part in (status.reason, status.failure) if part
        )
    error_text = failed or _not_done(entry)
    return (RunState.FAILED, error_text) if error_text else (RunState.SUCCEEDED, None)


def _not_done(entry: Entry) -> str | None:
    # `wait` is ignored: if its record is missing, the caller judges the attempt again.
    missing = [verb for verb in _VERBS if verb not in entry.verbs and verb != "wait"]
    return f"{missing[0]} was not done" if missing else None
