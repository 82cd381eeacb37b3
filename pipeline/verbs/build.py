"""build: freeze the code, and what it runs in."""

from manycpu.pipeline.targets import verbs_of
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.targets.results import Built

__all__ = ["build", "built_from"]


def build(ctx: RunContext) -> Built:
    """Freeze the code as the target needs it.

    Raises:
        BadInputError: The program's folder holds more than code.
        BuildError: The image cannot be built.
    """
    with ctx.ledger.timed("build") as record:
        built, reused = verbs_of(ctx).build(ctx)
        built = built.model_copy(update={"origin": built_from(ctx)})
        record.result = "reused" if reused else "done"
        with ctx.ledger.update() as entry:
            entry.code, entry.image = built.code, built.image
            entry.digests["code"] = built.digest
        return built


def built_from(ctx: RunContext) -> str:
    """Tell from which fields a run would be built."""
    return ctx.origin("program")
