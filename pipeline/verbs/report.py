"""report: have the last word, in report.json and in the run's result."""

from manycpu.pipeline import report as reports
from manycpu.pipeline.report import Report
from manycpu.pipeline.spec.errors import CancelledError, LeftBehindError, ManycpuError, TrainingFailedError
from manycpu.pipeline.spec.state import RunState
from manycpu.pipeline.verbs.context import RunContext

__all__ = ["conclude_report", "report_path"]

_ERRORS: dict[RunState, type[ManycpuError]] = {RunState.CANCELLED: CancelledError}


def report_path(ctx: RunContext) -> str:
    """Name the report's path or URL."""
    where = ctx.output.root if ctx.output.local is not None else ctx.output.url
    return f"{where.rstrip('/')}/{reports.REPORT}"


def conclude_report(ctx: RunContext) -> Report:
    """Read the report back, and raise what it says.

    Raises:
        ManycpuError: A verb failed, the training was cancelled, or no report was ever written.
        LeftBehindError: Something is left behind.
    """
    written = reports.read(ctx.output)
    if written is None or written.key != ctx.key:
        raise TrainingFailedError(
            "the run ended without a report: it never got past prepare", fix="See the first step that failed"
        )
    if written.state is not RunState.SUCCEEDED:
        raise _ERRORS.get(written.state, TrainingFailedError)(written.error or f"the run {written.state}")
    if written.left_behind:
        raise LeftBehindError(
            f"the run left behind: {', '.join(written.left_behind)}", fix="`manycpu clean` tries again"
        )
    return written
