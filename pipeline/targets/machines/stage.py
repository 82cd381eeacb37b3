"""Stage to machines: the volume is a folder; on the hosts of a hostfile, the same folder on each."""

from collections.abc import Callable, Mapping
from pathlib import Path

from manycpu.pipeline import transfer
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.spec.credentials import without
from manycpu.pipeline.spec.errors import StageError
from manycpu.pipeline.targets.context import MachineContext
from manycpu.pipeline.targets.machines.hosts import deliver
from manycpu.pipeline.targets.machines.shared_folders import bring
from manycpu.pipeline.targets.results import Copied

__all__ = ["stage"]

Progress = Callable[[int, int], None]


def stage(ctx: MachineContext, sources: Mapping[str, str], progress: Progress) -> dict[str, Copied]:
    """Copy each source to the target's folder, named by its content.

    Raises:
        StageError: The source changed, cannot be read, or the disk is full.
    """
    return {name: _stage_one(ctx, name, url, progress) for name, url in sources.items()}


def _stage_one(ctx: MachineContext, name: str, url: str, progress: Progress) -> Copied:
    field = f"run.{name}"
    source = Location.of(url, field)
    try:
        identity = transfer.identity(source)
        folder = ctx.home / name / identity[: transfer.DIGITS]
        folder, manifest, reused = bring(ctx, source, folder, identity, progress)
    except transfer.TransferError as error:
        fix = "Stage again when nothing writes to it"
        raise StageError(without(f"{url} was not staged: {error}", url), field=field, fix=fix) from error
    except Exception as error:
        # Every protocol of fsspec has errors of its own.
        fix = f"See that it can be read and that {ctx.home} has room, or set target.directory; then run again"
        raise StageError(without(f"{url} was not staged: {error}", url), field=field, fix=fix) from error
    delivered = deliver(ctx, folder)
    return Copied(_path_on_node(source, folder), manifest.digest, reused and not delivered)


def _path_on_node(source: Location, folder: Path) -> str:
    """Return the staged folder, or the file itself where the source is one file."""
    return str(folder / source.root.rsplit("/", 1)[-1]) if source.is_file() else str(folder)
