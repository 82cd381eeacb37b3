"""export: copy the trained model to the output, and verify the copy."""

import logging
import socket
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from manycpu.pipeline import run_report
from manycpu.pipeline.spec.credentials import redacted, without_secrets
from manycpu.pipeline.spec.errors import ExportError
from manycpu.pipeline.spec.handle import Handle
from manycpu.pipeline.spec.state import RunState
from manycpu.pipeline.spec.words import first_of
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.transfer import Manifest
from manycpu.pipeline.verbs.report import write_report

_LOG = logging.getLogger(__name__)
Progress = Callable[[int, int], None]


class Exported(BaseModel):
    """The result of an export: its destination, number of files, bytes, and the sha256 of its manifest."""

    model_config = ConfigDict(frozen=True)

    path: str | None
    """Path of the output, or its URL without credentials; None: ``run.output`` is null, with no files."""
    files: int
    bytes: int
    sha256: str
    metrics: dict[str, object] = {}


def export(ctx: RunContext, handle: Handle, progress: Progress = lambda *_: None) -> Exported:
    """Copy the files of an attempt's program to the run's output, and verify the copy.

    If an earlier try has exported this attempt, and the model can be seen in the output, its result is
    returned. If ``run.output`` is null, nothing is copied. In all cases but the first, this writes a first
    report, and warns of files that the program wrote outside of its output.

    Raises:
        ExportError: The program wrote no files, the output cannot be written, or the copy differs.
    """
    with ctx.ledger.timed("export") as record:
        if ctx.run.output is None:
            record.result = "skipped"
            manifest = Manifest(files=())
        else:
            entry = ctx.ledger.read()
            earlier_export = entry.export if entry.attempt == handle.attempt else None
            if earlier_export is not None and is_model_visible(ctx, earlier_export):
                # A clean-up may have been killed while it deleted the attempt's files: the rest is no model.
                return Exported(**earlier_export, metrics=ctx.driver.observed_of(ctx, handle).metrics)
            manifest = ctx.driver.export(ctx, handle, progress)
            if not manifest.files:
                raise _record_no_model(ctx, handle)
        _warn_of_strays(ctx, handle)
        observed = ctx.driver.observed_of(ctx, handle)
        exported = Exported(
            path=ctx.run.output and redacted(ctx.run.output),
            files=len(manifest.files),
            bytes=manifest.size,
            sha256=manifest.digest if manifest.files else "",
            metrics=observed.metrics,
        )
        with ctx.ledger.update() as entry:
            entry.export = exported.model_dump(exclude={"metrics"})
        try:
            write_report(ctx, run_report.draft(entry, observed, RunState.RUNNING))
        except ExportError as error:  # the clean-up writes it again, and its error counts
            _LOG.warning("%s", error)
        return exported


def _warn_of_strays(ctx: RunContext, handle: Handle) -> None:
    """Warn about files that the program wrote outside its output, and that no export keeps."""
    if ctx.run.output is None:  # then the clean-up keeps what the program wrote, for a time
        return
    strays = ctx.driver.strays(ctx, ctx.ledger.read(), handle)
    if strays:
        message = (
            "the program wrote outside its output %s, which is not kept: have it write to $MANYCPU_OUTPUT"
        )
        _LOG.warning(message, first_of(strays))


def _record_no_model(ctx: RunContext, handle: Handle) -> ExportError:
    """Record that an attempt wrote no model, so that the next try trains again; return the error to raise."""
    with ctx.ledger.update() as entry:
        entry.attempts[handle.attempt] = entry.described(handle.attempt).model_copy(
            update={"fruitless": True}
        )
    strays = ctx.driver.strays(ctx, entry, handle)
    detail = f" to its output; it wrote {first_of(strays)} instead" if strays else ""
    return ExportError(
        f"the training succeeded, but the program wrote nothing{detail}",
        field="run.output",
        fix="Have it write its model to {output}, or $MANYCPU_OUTPUT ({checkpoints} is not exported), and "
        "run again (this trains again). If the program writes no model, set run.output to null",
    )


def is_model_visible(ctx: RunContext, exported: Mapping[str, Any] | None, *, sizes: bool = True) -> bool:
    """Whether the run was exported to its present output, and the model can be seen there.

    Args:
        ctx: The run. If its ``run.output`` is null, a record without a path is enough: there is no model.
        exported: The record of the export in the ledger or the report; None: there is no record.
        sizes: Whether each file must have the size that was exported.
    """
    return has_present_output(ctx, exported) and why_model_invisible(ctx, exported, sizes=sizes) is None


def has_present_output(ctx: RunContext, exported: Mapping[str, Any] | None) -> bool:
    """Whether an export is recorded, and went to the run's present output, which may be null."""
    return exported is not None and exported["path"] == (ctx.run.output and redacted(ctx.run.output))


def why_model_invisible(
    ctx: RunContext, exported: Mapping[str, Any] | None, *, sizes: bool = True
) -> str | None:
    """Explain why the exported model, with all of its files, cannot be seen in the output.

    Tasks of a DAG may run on several workers. A model on the disk of one worker is invisible to the others.
    If only pods reach the output, a pod looks.

    Args:
        ctx: The run.
        exported: The record of the export; None: there is no record.
        sizes: Whether each file must have the size that was exported.

    Returns:
        The reason; None: the model can be seen, or there is none to see.
    """
    if exported is None or ctx.run.output is None:
        return None
    try:
        # Edited since? On disks, another path may lead to the same files, so the files decide there.
        if ctx.output_in_cluster and not has_present_output(ctx, exported):
            return f"that was {exported['path']}"
        return ctx.driver.why_not_exported(ctx, exported["sha256"], sizes=sizes)
    except Exception as error:  # noqa: BLE001 - each fsspec protocol raises its own error types
        return str(error) or type(error).__name__


def invisible_model_error(ctx: RunContext, handle: Handle, reason: str) -> str:
    """Say that the exported model cannot be seen in the output, why, and where it is kept."""
    model = ctx.driver.model_of(ctx, handle)
    return without_secrets(
        f"run.output: the model was exported to {ctx.run.output} and is not to be seen there from "
        f"{socket.gethostname()}: {reason}. It is kept in {model}. Give an output that every worker reaches, "
        "and run again with the same run id.",
        str(ctx.run.output),
    )
