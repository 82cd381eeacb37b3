"""build: freeze the code, and what it runs in."""

import importlib.util
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from manycpu.pipeline import transfer
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.spec import program
from manycpu.pipeline.verbs.context import RunContext
from manycpu.pipeline.verbs.place import on_target

__all__ = [
    "Built",
    "build",
    "built_from",
    "installed",
    "installed_digest",
    "module_root",
    "program_of",
]

_PACKAGE = Path(__file__).resolve().parents[1]


class Built(BaseModel):
    """The code that will run: its folder on every node, Python's arguments there, and its digest."""

    model_config = ConfigDict(frozen=True)

    code: str | None
    """None for what is installed with manycpu itself or in the environment."""
    program: tuple[str, ...]
    digest: str
    image: str | None = None
    """The image by digest, on targets that have images."""
    origin: str = ""
    """Tells from which fields it was built; empty where an older version did."""


def build(ctx: RunContext) -> Built:
    """Freeze the code as the target needs it.

    Raises:
        BadInputError: The program's folder holds more than code.
        BuildError: The image cannot be built.
    """
    with ctx.ledger.timed("build") as record:
        built: Built
        built, reused = on_target(ctx, "build").build(ctx)
        built = built.model_copy(update={"origin": built_from(ctx)})
        record.result = "reused" if reused else "done"
        with ctx.ledger.update() as entry:
            entry.code, entry.image = built.code, built.image
            entry.digests["code"] = built.digest
        return built


def built_from(ctx: RunContext) -> str:
    """Tell from which fields a run would be built."""
    return ctx.origin("program")


def program_of(ctx: RunContext) -> tuple[Path | None, tuple[str, ...]]:
    """Find the folder of the program's code, and Python's arguments that run the program from there."""
    kind, name = program.parse(ctx.run.program)
    if kind == "script":
        path = Path(name)
        return path.parent, (path.name,)
    root = None if kind == "recipe" else module_root(name, ctx.base)
    return root, ("-m", name)


def module_root(name: str, base: Path) -> Path | None:
    """Find the folder that holds a module of the user's own; None for an installed one."""
    top = name.split(".", 1)[0]
    return base if (base / top).is_dir() or (base / f"{top}.py").is_file() else None


def installed(module: str) -> bool:
    """Whether a module is installed in this environment."""
    try:
        return importlib.util.find_spec(module.split(".", 1)[0]) is not None
    except ValueError:
        return False


def installed_digest() -> str:
    """Hash what of manycpu runs inside a training process."""
    parts = ("node", "recipes", "spec")
    files = [path for part in parts for path in sorted((_PACKAGE / part).rglob("*.py"))]
    source = Location.of(str(_PACKAGE), "run.program").only(
        [path.relative_to(_PACKAGE).as_posix() for path in files]
    )
    return transfer.scan(source).digest
