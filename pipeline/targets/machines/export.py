"""Copy the model out of the run's folder; of a hostfile's hosts, out of the folders of all."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

from manycpu.pipeline import transfer
from manycpu.pipeline.ledger import Entry
from manycpu.pipeline.spec.credentials import without
from manycpu.pipeline.spec.errors import ExportError
from manycpu.pipeline.spec.handle import ProcessHandle
from manycpu.pipeline.targets.context import MachineContext
from manycpu.pipeline.targets.machines import hosts
from manycpu.pipeline.targets.open_run import as_started

__all__ = ["export", "may_have_model", "model_of", "strays"]


def export(
    ctx: MachineContext, handle: ProcessHandle, progress: Callable[[int, int], None]
) -> transfer.Manifest:
    """Copy what the program wrote to the output; the manifest has no files where it wrote none.

    Raises:
        ExportError: The output cannot be written, or reads back otherwise.
    """
    source = _folder(handle)
    ran = as_started(ctx, ctx.ledger.read(), handle.attempt)
    hosts.collect(cast("MachineContext", ran), source)
    if all(item.is_folder for item in transfer.written(str(source)).items()):
        return transfer.Manifest()
    try:
        return transfer.publish(source, ctx.output, ctx.key, progress)
    except Exception as error:
        # Every protocol of fsspec has errors of its own.
        fix = f"The model is kept in {source}: mend the output, and run again with the same run id"
        text = without(f"{ctx.destination} was not written: {error}", ctx.destination)
        raise ExportError(text, field="run.output", fix=fix) from error


def model_of(ctx: MachineContext, handle: ProcessHandle) -> str:  # noqa: ARG001 - as everywhere
    """Name the folder that the program of an attempt wrote to."""
    return str(_folder(handle))


def may_have_model(ctx: MachineContext, handle: ProcessHandle) -> bool:  # noqa: ARG001 - as everywhere
    """Whether the program of an attempt has written files."""
    return any(path.is_file() for path in _folder(handle).rglob("*"))


def _folder(handle: ProcessHandle) -> Path:
    return Path(handle.directory) / "output"


def strays(ctx: MachineContext, entry: Entry, handle: ProcessHandle) -> list[str]:  # noqa: ARG001 - as everywhere
    """Name files that came into the snapshot of the code, where programs work, or into what was staged."""
    ran = entry.described(handle.attempt)
    folders = [Path(path) for path in (ran.code, ran.data, ran.model) if path]
    return [str(stray) for folder in folders for stray in transfer.strays(folder)]
