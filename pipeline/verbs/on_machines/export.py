"""Copy the model out of the run's folder; of a hostfile's hosts, from the first."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

from manycpu.pipeline import transfer
from manycpu.pipeline.spec.errors import ExportError
from manycpu.pipeline.spec.handle import ProcessHandle
from manycpu.pipeline.verbs.context import MachineContext, as_started
from manycpu.pipeline.verbs.on_machines import hosts

__all__ = ["export"]


def export(
    ctx: MachineContext, handle: ProcessHandle, progress: Callable[[int, int], None]
) -> transfer.Manifest:
    """Copy what the program wrote; the manifest has no files where it wrote none.

    Raises:
        ExportError: The output cannot be written, or reads back otherwise.
    """
    source = Path(handle.directory) / "output"
    ran = as_started(ctx, ctx.ledger.read(), handle.attempt)
    hosts.collect(cast("MachineContext", ran), source)
    if not any(path.is_file() for path in source.rglob("*")):
        return transfer.Manifest(files=())
    try:
        return transfer.publish(source, ctx.output, ctx.key, progress)
    except Exception as error:
        # Every protocol of fsspec has errors of its own.
        fix = f"The model is kept in {source}: mend the output, and run again with the same run id"
        raise ExportError(
            f"{ctx.run.output} was not written: {error}", field="run.output", fix=fix
        ) from error
