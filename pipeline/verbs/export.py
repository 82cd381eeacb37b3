"""export: bring the trained model to the output, verified, in one step."""

from collections.abc import Callable

from pydantic import BaseModel, ConfigDict

from manycpu.pipeline import report
from manycpu.pipeline.spec.errors import ExportError
from manycpu.pipeline.spec.handle import Handle
from manycpu.pipeline.spec.state import RunState
from manycpu.pipeline.transfer import Manifest
from manycpu.pipeline.verbs.context import RunContext
from manycpu.pipeline.verbs.place import on_target
from manycpu.pipeline.verbs.report import write_report
from manycpu.pipeline.verbs.wait import observed_of

__all__ = ["Exported", "export"]

Progress = Callable[[int, int], None]


class Exported(BaseModel):
    """What was exported: where to, how much, and the sha256 of its manifest."""

    model_config = ConfigDict(frozen=True)

    path: str
    files: int
    bytes: int
    sha256: str
    metrics: dict[str, object] = {}


def export(ctx: RunContext, handle: Handle, progress: Progress = lambda *_: None) -> Exported:
    """Copy what the program wrote to its output; what was read back is what was written.

    Raises:
        ExportError: The program wrote nothing, the output cannot be written, or reads back otherwise.
    """
    with ctx.ledger.timed("export"):
        manifest: Manifest = on_target(ctx, "export").export(ctx, handle, progress)
        if not manifest.files:
            raise ExportError(
                "the training succeeded, but the program wrote nothing",
                field="run.output",
                fix="Have it write its model to {output}, or $MANYCPU_OUTPUT",
            )
        observed = observed_of(ctx, handle)
        exported = Exported(
            path=ctx.run.output,
            files=len(manifest.files),
            bytes=manifest.size,
            sha256=manifest.digest,
            metrics=observed.metrics,
        )
        with ctx.ledger.update() as entry:
            entry.export = exported.model_dump(exclude={"metrics"})
        write_report(ctx, report.draft(entry, observed, RunState.RUNNING))
        return exported
