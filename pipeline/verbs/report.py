"""report: write and read report.json, which decides the result of the run."""

import logging
from collections.abc import Iterable
from contextlib import suppress

from manycpu.pipeline import run_report
from manycpu.pipeline.adapters.storage import Location, is_remote
from manycpu.pipeline.listeners import ReadableLog, tell
from manycpu.pipeline.page import as_html
from manycpu.pipeline.run_report import Report
from manycpu.pipeline.spec.credentials import redacted, without_secrets
from manycpu.pipeline.spec.errors import (
    BadInputError,
    CancelledError,
    ExportError,
    LeftBehindError,
    ManycpuError,
    NoReportError,
    OutputTakenError,
    TrainingFailedError,
)
from manycpu.pipeline.spec.events import split
from manycpu.pipeline.spec.handle import Handle
from manycpu.pipeline.spec.output import LOG, LOG_BEGINS, PAGE, REPORT, fields_of
from manycpu.pipeline.spec.state import RunState
from manycpu.pipeline.targets.context import RunContext, home
from manycpu.pipeline.targets.output import release

_LOG = logging.getLogger(__name__)
_NEWEST = "reports/newest"
"""File below $MANYCPU_HOME with the path or URL of the newest report."""
_ERRORS: dict[RunState, type[ManycpuError]] = {RunState.CANCELLED: CancelledError}


def report_path(ctx: RunContext) -> str:
    """Return the path of report.json, or its URL without credentials."""
    root = redacted(ctx.destination) if is_remote(ctx.destination) else ctx.output.root
    return f"{root.rstrip('/')}/{REPORT}"


def write_report(ctx: RunContext, report: Report) -> None:
    """Write report.json to the run's output; if the run has ended and the output is on disk, report.html too.

    If the output has an earlier report of this run, report.html is written first. After a kill before the
    second write, report.json still shows an unfinished run, and the next try writes both files. Otherwise
    report.html is written last, because it must not be beside the report of another run.

    If the run has ended, the claim of its output is released; in a cluster, the target does that.

    Raises:
        OutputTakenError: Another run has the output.
        ExportError: The output cannot be written; the message contains the error or state of the run.
    """
    text = run_report.as_json(report)
    has_page = report.state.terminal and not ctx.output_in_cluster and ctx.output.local is not None
    try:
        page_comes_last = has_page and fields_of(ctx.output.read_text(REPORT)).get("key") != ctx.key
        if has_page and not page_comes_last:
            _write_page(ctx, report)
        ctx.driver.write_report(ctx, text)
    except OutputTakenError:  # it names the run that has the output
        raise
    except Exception as error:
        # Each fsspec protocol raises its own error types.
        message = f"report.json cannot be written to {ctx.destination}: {error}"
        raise ExportError(
            without_secrets(f"{message}; {report.error or report.state}", ctx.destination),
            field="run.output",
            fix="Mend the output, and run again with the same run id",
        ) from error
    if page_comes_last:
        _write_page(ctx, report)
    if report.state.terminal and not ctx.output_in_cluster:
        release(ctx)


def _write_page(ctx: RunContext, report: Report) -> None:
    """Write report.html; an OSError is only logged, because report.json has the same content."""
    try:
        ctx.driver.write_beside(ctx, PAGE, as_html(report.model_dump(mode="json")))
    except OSError as error:
        _LOG.warning("report.html cannot be written to %s: %s", ctx.destination, error)


def log_of(ctx: RunContext, handle: Handle) -> str:
    """Return the content of run.log: the last few MiB of the ranks' lines, as a terminal shows them.

    Empty: there are no lines. If reading fails, the error is logged, and the lines before it are returned.
    """
    lines = list[str]()
    log = ReadableLog(lines.append)
    try:
        tell(map(split, ctx.driver.read_log(ctx, handle)), log)
        log.flush()
    except Exception as error:  # noqa: BLE001 - each fsspec protocol raises its own error types
        _LOG.warning("%s may lack lines: %s", LOG, without_secrets(str(error), ctx.destination))
    return LOG_BEGINS + "\n".join([*lines, ""]) if lines else ""


def write_log(ctx: RunContext, text: str) -> str | None:
    """Write run.log beside the report; return the reason if that failed, None if it did not.

    Nothing is written if ``text`` is empty.
    """
    try:
        if text:
            ctx.driver.write_beside(ctx, LOG, text)
    except Exception as error:  # noqa: BLE001 - each fsspec protocol raises its own error types
        return f"{LOG} is not written: {without_secrets(str(error), ctx.destination)}"
    return None


def remember(ctx: RunContext) -> None:
    """Record on this machine that this report is the newest; a failure to do so is ignored."""
    with suppress(OSError, BadInputError):
        Location.of(str(home()), field="$MANYCPU_HOME").write_text(_NEWEST, report_path(ctx))


def newest_report() -> str | None:
    """Return the path or URL of the newest report on this machine; None: there is none."""
    return Location.of(str(home()), field="$MANYCPU_HOME").read_text(_NEWEST)


def read_report(ctx: RunContext) -> Report:
    """Read report.json from the run's output.

    Raises:
        ExportError: It cannot be read.
        NoReportError: This run has no report there.
    """
    try:
        text = ctx.driver.read_beside(ctx, REPORT)
    except Exception as error:
        # Each fsspec protocol raises its own error types.
        raise ExportError(
            without_secrets(f"report.json cannot be read from {ctx.destination}: {error}", ctx.destination),
            field="run.output",
            fix="See the first step that failed, and whether the output can be reached",
        ) from error
    report = run_report.parse(text)
    if report is None or report.key != ctx.key:
        raise NoReportError(
            "the run ended without a report: it never got past prepare", fix="See the first step that failed"
        )
    return report


def conclude(report: Report) -> Report:
    """Return a report if it records a success; else raise the error that it records.

    Raises:
        CancelledError: The training was cancelled.
        TrainingFailedError: A verb failed.
        LeftBehindError: The clean-up could not delete everything.
    """
    if report.state is not RunState.SUCCEEDED:
        text = report.error or f"the last word of the run is: {report.state}"
        raise _ERRORS.get(report.state, TrainingFailedError)(
            f"{text}\n{report.advice}" if report.advice else text
        )
    if report.left_behind:
        raise left_behind_error(report.left_behind)
    return report


def left_behind_error(left: Iterable[str]) -> LeftBehindError:
    """Make the error for what a clean-up could not delete."""
    return LeftBehindError(f"the run left behind: {', '.join(left)}", fix="`manycpu clean` tries again")
