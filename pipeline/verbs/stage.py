"""stage: bring the data set and the base model to the volume, once for each content."""

from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from manycpu.pipeline import transfer
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.ledger import Entry
from manycpu.pipeline.spec.errors import StageError
from manycpu.pipeline.verbs.context import RunContext
from manycpu.pipeline.verbs.hosts import deliver

__all__ = ["Staged", "stage"]

_DIGITS = 16
Progress = Callable[[int, int], None]


class Staged(BaseModel):
    """What was staged: where it is on every node, and the digest of its manifest."""

    model_config = ConfigDict(frozen=True)

    data: str | None = None
    model: str | None = None
    digests: dict[str, str] = {}


def stage(ctx: RunContext, progress: Progress = lambda *_: None) -> Staged:
    """Copy what is not there yet, verified; a break is taken up by the next try.

    Raises:
        StageError: The source changed, cannot be read, or the disk is full.
    """
    with ctx.ledger.timed("stage") as record:
        sources = {"data": ctx.run.data, "model": ctx.run.model}
        wanted = {name: url for name, url in sources.items() if url}
        found = {name: _stage_one(ctx, name, url, progress) for name, url in wanted.items()}
        if not found:
            record.result = "skipped"
        elif all(reused for _, _, reused in found.values()):
            record.result = "reused"
        staged = Staged(
            **{name: path for name, (path, _, _) in found.items()},
            digests={name: digest for name, (_, digest, _) in found.items()},
        )
        with ctx.ledger.update() as (entry, _):
            _remember(entry, staged)
        return staged


def _stage_one(ctx: RunContext, name: str, url: str, progress: Progress) -> tuple[str, str, bool]:
    field = f"run.{name}"
    source = Location.of(url, field)
    try:
        identity = transfer.identity(source)
        folder = ctx.home / name / identity[:_DIGITS]
        before = transfer.staged(folder)
        manifest = before or transfer.fetch(source, folder, progress)
    except transfer.TransferError as error:
        raise StageError(str(error), field=field, fix="Stage again when nothing writes to it") from error
    except Exception as error:
        # Every protocol of fsspec has errors of its own.
        fix = f"See that it can be read and that {ctx.home} has room, or set target.directory; then run again"
        raise StageError(f"{url} was not staged: {error}", field=field, fix=fix) from error
    if source.local is not None and manifest.digest != identity:
        raise StageError(f"{url} changed while it was staged", field=field, fix="Run again")
    delivered = deliver(ctx, folder)
    return _path_on_node(source, folder), manifest.digest, before is not None and not delivered


def _path_on_node(source: Location, folder: Path) -> str:
    """Name the file itself where the source is one file: that is what the program was written for."""
    return str(folder / source.root.rsplit("/", 1)[-1]) if source.is_file() else str(folder)


def _remember(entry: Entry, staged: Staged) -> None:
    entry.data, entry.model = staged.data, staged.model
    entry.digests |= staged.digests
