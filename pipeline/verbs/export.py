"""export: copy the trained model to the output, and verify the copy."""

import logging
import socket
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from manycpu.pipeline import run_report, transfer
from manycpu.pipeline.ledger import Entry
from manycpu.pipeline.spec.credentials import redacted, without_secrets
from manycpu.pipeline.spec.errors import ExportError
from manycpu.pipeline.spec.handle import Handle
from manycpu.pipeline.spec.output import MANIFEST, manifests
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
    if exported is None or exported["path"] != (ctx.run.output and redacted(ctx.run.output)):
        return False
    return ctx.run.output is None or _why_not_visible(ctx, exported["sha256"], sizes=sizes) is None


def why_model_invisible(ctx: RunContext, entry: Entry, handle: Handle) -> str | None:
    """Explain why this machine cannot see the exported model; None: it can, or there is none to see.

    Tasks of a DAG may run on several workers. A model on the disk of one worker is invisible to the others.
    """
    if entry.export is None or ctx.run.output is None:
        return None
    if ctx.output_in_cluster:  # all pods reach the same URL, but it may have been edited since
        is_there = entry.export["path"] == redacted(ctx.run.output)
        reason = None if is_there else f"that was {entry.export['path']}"
    else:
        reason = _why_not_visible(ctx, entry.export["sha256"])
    if reason is None:
        return None
    model = ctx.driver.model_of(ctx, handle)
    return without_secrets(
        f"run.output: the model was exported to {ctx.run.output} and is not to be seen there from "
        f"{socket.gethostname()}: {reason}. It is kept in {model}. Give an output that every worker reaches, "
        "and run again with the same run id.",
        ctx.run.output,
    )


def _why_not_visible(ctx: RunContext, digest: str, *, sizes: bool = True) -> str | None:
    """Explain why the exported model, with all of its files, cannot be seen in the output; None: it can.

    ``digest`` is that of the export's manifest. A manifest with another digest is of another model, and does
    not count.
    """
    try:
        # In the cluster, a pod reads each file: only the first two names, which are always listed, are tried.
        # A third exists only if the program wrote files of these names.
        names = manifests(has=lambda _: False) if ctx.output_in_cluster else manifests(ctx.output.has)
        texts = [text for name in names if (text := ctx.driver.read_beside(ctx, name)) is not None]
        for text in texts:
            try:
                manifest, _ = Manifest.parse(text)
            except ValueError:  # a file of the program, which has the same name
                continue
            if manifest.digest == digest:
                if ctx.output_in_cluster:
                    return None
                return transfer.why_incomplete(ctx.output, manifest, sizes=sizes)
    except Exception as error:  # noqa: BLE001 - each fsspec protocol raises its own error types
        return str(error) or type(error).__name__
    return f"its {MANIFEST} is of another model" if texts else f"there is no {MANIFEST}"
