"""build: make a snapshot of the code, or an image that contains it."""

from manycpu.pipeline.targets.context import Built, RunContext
from manycpu.pipeline.targets.program_code import installed_digest

_DIGITS = 10  # of a digest


def build(ctx: RunContext) -> Built:
    """Make a snapshot of the code, or an image that contains it, as the target needs.

    The ledger records where it is.

    Raises:
        BadInputError: The program's folder is too large to be code, or ignore files leave out the program.
        BuildError: The image cannot be built, or a folder of the code cannot be listed.
    """
    with ctx.ledger.timed("build") as record:
        built, reused = ctx.driver.build(ctx)
        built = built.model_copy(update={"origin": built_from(ctx)})
        record.result = "reused" if reused else "done"
        with ctx.ledger.update() as entry:
            entry.code, entry.image = built.code, built.image
            entry.digests["code"] = built.digest
        return built


def built_from(ctx: RunContext) -> str:
    """Hash what a build depends on: the run's program, the target, and the part of manycpu that ranks run."""
    return f"{ctx.origin('program')}-{installed_digest()[:_DIGITS]}"
