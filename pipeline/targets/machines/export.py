"""Copy the model from the run's folder to the output, including files on the hosts of a hostfile."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

from manycpu.pipeline import transfer
from manycpu.pipeline.adapters import disk
from manycpu.pipeline.ledger import Entry
from manycpu.pipeline.spec.credentials import without
from manycpu.pipeline.spec.errors import ExportError
from manycpu.pipeline.spec.handle import ProcessHandle
from manycpu.pipeline.spec.output import RETURNED
from manycpu.pipeline.targets.machines import hosts
from manycpu.pipeline.targets.machines.context import MachineContext
from manycpu.pipeline.targets.machines.launch import working_folder
from manycpu.pipeline.targets.open_run import as_started

__all__ = ["export", "may_have_model", "output_of", "read_returned", "strays"]


def export(
    ctx: MachineContext, handle: ProcessHandle, progress: Callable[[int, int], None]
) -> transfer.Manifest:
    """Copy the program's files to the output; the manifest is empty if the program wrote none.

    Raises:
        ExportError: The output cannot be written, the copy differs, or hosts have different files of a name.
        LaunchError: A host cannot be reached.
    """
    source = output_of(handle)
    ran = as_started(ctx, ctx.ledger.read(), handle.attempt)
    hosts.collect(cast("MachineContext", ran), source)
    if not source.exists() or all(item.is_folder for item in transfer.written(str(source)).items()):
        return transfer.Manifest()
    try:
        return transfer.publish(source, ctx.output, ctx.key, progress)
    except Exception as error:
        # Each fsspec protocol raises its own error types.
        fix = f"The model is kept in {source}: mend the output, and run again with the same run id"
        text = without(f"{ctx.destination} was not written: {error}", ctx.destination)
        raise ExportError(text, field="run.output", fix=fix) from error


def read_returned(ctx: MachineContext, handle: ProcessHandle, name: str) -> bytes:
    """Read a file of the return value of a notebook's function, from this machine or a host.

    Raises:
        LaunchError: A host cannot be reached.
        OSError: No machine has the file.
    """
    folder = Path(handle.directory) / RETURNED
    hosts.collect(cast("MachineContext", as_started(ctx, ctx.ledger.read(), handle.attempt)), folder)
    return (folder / name).read_bytes()


def may_have_model(ctx: MachineContext, handle: ProcessHandle) -> bool:
    """Whether the program of an attempt may have written files to its output, here or on a host."""
    folder = output_of(handle)
    return disk.may_hold_files(folder) or bool(hosts.holding_files(ctx, folder))


def output_of(handle: ProcessHandle) -> Path:
    """Return the folder that the program of an attempt wrote to."""
    return Path(handle.directory) / "output"


def strays(ctx: MachineContext, entry: Entry, handle: ProcessHandle) -> list[str]:
    """Name files that the program wrote to its working folder, here or on a host, or to staged folders."""
    ran = entry.described(handle.attempt)
    work = working_folder(Path(handle.directory))
    written = transfer.strays(Path(ran.code), work) if ran.code and work.is_dir() else []
    staged = [Path(path) for path in (ran.data, ran.model) if path]
    code = transfer.staged(Path(ran.code)) if ran.code else None
    listed = {f"work/code/{file.path}" for file in code.files} if code else set()
    on_hosts = hosts.strays(ctx, Path(handle.directory), listed)
    return [
        *map(str, written),
        *on_hosts,
        *(str(stray) for folder in staged for stray in transfer.strays(folder)),
    ]
