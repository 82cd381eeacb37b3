"""stage: bring the data set and the base model to the volume, once for each content."""

from collections.abc import Callable
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from manycpu.pipeline.verbs.context import RunContext
from manycpu.pipeline.verbs.place import on_target

__all__ = ["Copied", "Staged", "stage", "staged_from"]

Progress = Callable[[int, int], None]


class Staged(BaseModel):
    """What was staged: where it is on every node, and the digest of its manifest."""

    model_config = ConfigDict(frozen=True)

    data: str | None = None
    model: str | None = None
    digests: dict[str, str] = {}
    origin: str = ""
    """Tells from which fields it was staged; empty where an older version did."""


class Copied(NamedTuple):
    """One source on the volume: its path on every node, its manifest's digest, and whether it was there."""

    path: str
    digest: str
    reused: bool


def stage(ctx: RunContext, progress: Progress = lambda *_: None) -> Staged:
    """Copy what is not there yet, verified; a break is taken up by the next try.

    Raises:
        StageError: The source changed, cannot be read, or the volume is full.
    """
    with ctx.ledger.timed("stage") as record:
        sources = {"data": ctx.run.data, "model": ctx.run.model}
        wanted = {name: url for name, url in sources.items() if url}
        found: dict[str, Copied] = on_target(ctx, "stage").stage(ctx, wanted, progress)
        if not found:
            record.result = "skipped"
        elif all(copied.reused for copied in found.values()):
            record.result = "reused"
        staged = Staged(
            **{name: copied.path for name, copied in found.items()},
            digests={name: copied.digest for name, copied in found.items()},
            origin=staged_from(ctx),
        )
        with ctx.ledger.update() as entry:
            entry.data, entry.model = staged.data, staged.model
            entry.digests |= staged.digests
        return staged


def staged_from(ctx: RunContext) -> str:
    """Tell from which fields a run would be staged."""
    return ctx.origin("data", "model")
