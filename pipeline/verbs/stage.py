"""stage: copy the data set and the base model to where the ranks read them, once for each content."""

from collections.abc import Callable

from manycpu.pipeline.targets.context import RunContext, Staged

Progress = Callable[[int, int], None]


def stage(ctx: RunContext, progress: Progress = lambda *_: None) -> Staged:
    """Copy data and base model to where the ranks read them, and verify the copies.

    A copy that exists is used again, and a partial copy is resumed. The ledger records where the copies are.

    Raises:
        StageError: A source changed or cannot be read, or the volume is full.
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
    """Hash what staging depends on: ``run.data``, ``run.model`` and the target."""
    return ctx.origin("data", "model")
