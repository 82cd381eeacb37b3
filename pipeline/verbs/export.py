"""export: bring the trained model to the output, verified, in one step."""

from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from manycpu.pipeline import report, transfer
from manycpu.pipeline.spec.errors import ExportError
from manycpu.pipeline.spec.handle import Handle
from manycpu.pipeline.spec.state import RunState
from manycpu.pipeline.verbs import hosts
from manycpu.pipeline.verbs.context import RunContext
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
        source = Path(handle.directory) / "output"
        hosts.collect(ctx, source)
        if not any(path.is_file() for path in source.rglob("*")):
            raise ExportError(
                "the training succeeded, but the program wrote nothing",
                field="run.output",
                fix="Have it write its model to {output}, or $MANYCPU_OUTPUT",
            )
        try:
            manifest = transfer.publish(source, ctx.output, ctx.key, progress)
        except Exception as error:
            # Every protocol of fsspec has errors of its own.
            fix = f"The model is kept in {source}: mend the output, and run again with the same run id"
            raise ExportError(
                f"{ctx.run.output} was not written: {error}", field="run.output", fix=fix
            ) from error
        exported = Exported(
            path=ctx.run.output,
            files=len(manifest.files),
            bytes=manifest.size,
            sha256=manifest.digest,
            metrics=observed_of(handle).metrics,
        )
        with ctx.ledger.update() as (entry, _):
            entry.export = exported.model_dump(exclude={"metrics"})
        report.write(ctx.output, report.draft(entry, observed_of(handle), RunState.RUNNING))
        return exported
