"""Stage to machines: copy sources to a folder here, and to the same folder on each host of a hostfile."""

from collections.abc import Callable, Mapping
from pathlib import Path

from manycpu.pipeline import transfer
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.spec.credentials import without
from manycpu.pipeline.spec.errors import BadInputError, LaunchError, StageError
from manycpu.pipeline.targets.machines.context import MachineContext, home_of
from manycpu.pipeline.targets.machines.hosts import hosts_without
from manycpu.pipeline.targets.machines.shared_folders import bring
from manycpu.pipeline.targets.results import Copied

__all__ = ["stage"]

Progress = Callable[[int, int], None]


def stage(ctx: MachineContext, sources: Mapping[str, str], progress: Progress) -> dict[str, Copied]:
    """Copy each source to the target's folder, named by its content, or use it in place.

    Raises:
        StageError: A source changed, cannot be read, or differs on a host; or the disk is full.
        LaunchError: A host cannot be reached.
    """
    return {name: _stage_one(ctx, name, url, progress) for name, url in sources.items()}


def _stage_one(ctx: MachineContext, name: str, url: str, progress: Progress) -> Copied:
    field = f"run.{name}"
    source = Location.of(url, field)
    try:
        if ctx.target.stage == "in_place" and source.local is not None:
            return _in_place(ctx, source.local, transfer.scan(source), field)
        identity = transfer.identity(source)
        folder = home_of(ctx) / name / identity[: transfer.DIGITS]
        folder, manifest, reused = bring(ctx, source, folder, identity, progress)
    except (BadInputError, LaunchError, StageError):  # these already say which host or field
        raise
    except transfer.TransferError as error:
        fix = "Stage again when nothing writes to it"
        raise StageError(without(f"{url} was not staged: {error}", url), field=field, fix=fix) from error
    except Exception as error:
        # Each fsspec protocol raises its own error types.
        home = home_of(ctx)
        fix = f"See that it can be read and that {home} has room, or set target.directory; then run again"
        raise StageError(without(f"{url} was not staged: {error}", url), field=field, fix=fix) from error
    return Copied(_path_on_node(source, folder), manifest.digest, reused)


def _in_place(ctx: MachineContext, path: Path, manifest: transfer.Manifest, field: str) -> Copied:
    if lacking := hosts_without(ctx, path, manifest):
        raise StageError(
            f"{path} is not the same here and on {', '.join(lacking)}",
            field=field,
            fix="Share its folder with every host, or set target.stage to copy",
        )
    return Copied(str(path), manifest.digest, reused=True)


def _path_on_node(source: Location, folder: Path) -> str:
    """Return the staged folder, or the file in it if the source is one file."""
    return str(folder / source.root.rsplit("/", 1)[-1]) if source.is_file() else str(folder)
