"""report: have the last word, in report.json and in the run's result.

The output of a run on Kubernetes that is a URL is written and read inside the cluster: the worker needs
neither its credentials nor a way to it.
"""

from collections.abc import Sequence
from typing import Any

from manycpu.pipeline import report as reports
from manycpu.pipeline.adapters.storage import is_remote
from manycpu.pipeline.report import Report
from manycpu.pipeline.spec.credentials import redacted, without
from manycpu.pipeline.spec.errors import (
    CancelledError,
    ExportError,
    Finding,
    LeftBehindError,
    ManycpuError,
    TrainingFailedError,
    raise_findings,
)
from manycpu.pipeline.spec.output import replaceable
from manycpu.pipeline.spec.state import RunState
from manycpu.pipeline.verbs.context import ClusterContext, RunContext
from manycpu.pipeline.verbs.place import on_target

__all__ = [
    "conclude",
    "in_the_cluster",
    "not_empty",
    "occupied",
    "read_report",
    "report_path",
    "write_report",
]

_ERRORS: dict[RunState, type[ManycpuError]] = {RunState.CANCELLED: CancelledError}


def in_the_cluster(ctx: RunContext) -> bool:
    """Whether the run's output is reached from inside the cluster, and never from here."""
    return isinstance(ctx, ClusterContext) and is_remote(ctx.destination)


def report_path(ctx: RunContext) -> str:
    """Name the report's path, or its URL without credentials."""
    where = redacted(ctx.destination) if is_remote(ctx.destination) else ctx.output.root
    return f"{where.rstrip('/')}/{reports.REPORT}"


def write_report(ctx: RunContext, report: Report) -> None:
    """Write report.json into the run's output.

    Raises:
        ExportError: It cannot be written; with what the report says of the run.
    """
    text = reports.as_json(report)
    try:
        if in_the_cluster(ctx):
            on_target(ctx, "report").write(ctx, text)
        else:
            raise_findings(_foreign_report(ctx))
            ctx.output.write_text(reports.REPORT, text)
    except Exception as error:
        # Every protocol of fsspec has errors of its own.
        text = f"report.json cannot be written to {ctx.destination}: {error}; {report.error or report.state}"
        raise ExportError(
            without(text, ctx.destination),
            field="run.output",
            fix="Mend the output, and run again with the same run id",
        ) from error


def _foreign_report(ctx: RunContext) -> list[Finding]:
    """Leave a report.json alone that is a file of the user's own, or stands beside another run's model."""
    if replaceable(ctx.output.read_text(reports.REPORT), ctx.key):
        return []
    return [not_empty(ctx, reports.REPORT)]


def read_report(ctx: RunContext) -> Report:
    """Read the report back.

    Raises:
        ExportError: It cannot be read.
        TrainingFailedError: No report was ever written.
    """
    try:
        inside = in_the_cluster(ctx)
        text: Any = on_target(ctx, "report").read(ctx) if inside else ctx.output.read_text(reports.REPORT)
    except Exception as error:
        # Every protocol of fsspec has errors of its own.
        raise ExportError(
            without(f"report.json cannot be read from {ctx.destination}: {error}", ctx.destination),
            field="run.output",
            fix="See the first step that failed, and whether the output can be reached",
        ) from error
    written = reports.parse(text)
    if written is None or written.key != ctx.key:
        raise TrainingFailedError(
            "the run ended without a report: it never got past prepare", fix="See the first step that failed"
        )
    return written


def conclude(written: Report) -> Report:
    """Raise what a report says.

    Raises:
        ManycpuError: A verb failed, or the training was cancelled.
        LeftBehindError: Something is left behind.
    """
    if written.state is not RunState.SUCCEEDED:
        raise _ERRORS.get(written.state, TrainingFailedError)(
            written.error or f"the last word of the run is: {written.state}"
        )
    if written.left_behind:
        raise LeftBehindError(
            f"the run left behind: {', '.join(written.left_behind)}", fix="`manycpu clean` tries again"
        )
    return written


def occupied(ctx: RunContext, names: Sequence[str], text: str | None) -> Finding | None:
    """Say whether an output holds what this run must not overwrite.

    Args:
        ctx: The run.
        names: Files in the output; of many, two will do.
        text: The report.json among them; None where there is none.
    """
    before = reports.parse(text)
    mine = before is not None and before.key == ctx.key
    only_a_failure = before is not None and replaceable(text, ctx.key) and len(names) == 1
    return None if not names or mine or only_a_failure else not_empty(ctx, names[0])


def not_empty(ctx: RunContext, name: str) -> Finding:
    """Say that an output holds a file, or an empty folder, which this run did not write."""
    return Finding(
        "run.output",
        f"{ctx.destination} is not empty: {name} is in it",
        "Give an empty or new folder; a run never overwrites what it did not make",
    )
