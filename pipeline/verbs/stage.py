"""stage: bring the data set and the base model to the volume, once for each content."""

from collections.abc import Callable

from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.targets.results import Staged

__all__ = ["stage", "staged_from"]

Progress = Callable[[int, int], None]


def stage(ctx: RunContext, progress: Progress = lambda *_: None) -> Staged:
    """Copy data and model to the volume, verified, unless they are there; a retry resumes a broken copy.

    Raises:
        StageError: The source changed, cannot be read, or the volume is full.
    """
    with ctx.ledger.timed("stage") as record:
        sources = {"data": ctx.run.data, "model": ctx.run.model}
        copies = ctx.driver.stage(ctx, {name: url for name, url in sources.items() if url}, progress)
        if not copies:
            record.result = "skipped"
        elif all(copied.reused for copied in copies.values()):
            record.result = "reused"
        staged = Staged(
            **{name: copied.path for name, copied in copies.items()},
            digests={name: copied.digest for name, copied in copies.items()},
            origin=staged_from(ctx),
        )
        with ctx.ledger.update() as entry:
            entry.data, entry.model = staged.data, staged.model
            entry.digests |= staged.digests
        return staged


def staged_from(ctx: RunContext) -> str:
    """Return where the fields come from that staging depends on."""
    return ctx.origin("data", "model")
