"""build: freeze the code, and what it runs in."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from manycpu.pipeline import transfer
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.spec import program
from manycpu.pipeline.spec.errors import BuildError
from manycpu.pipeline.verbs.context import RunContext
from manycpu.pipeline.verbs.place import on_target

__all__ = [
    "Built",
    "build",
    "built_from",
    "code_of",
    "installed",
    "installed_digest",
    "module_root",
    "program_of",
]

_MAX_BYTES, _MAX_FILES = 100 << 20, 10_000
_NOT_CODE = {"__pycache__", "node_modules", "venv", "env", "site-packages"}
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
        BuildError: The program's folder holds more than code, or the image cannot be built.
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


def code_of(ctx: RunContext, root: Path, excluded: set[Path]) -> Location:
    """Choose what of a program's folder is its code.

    Raises:
        BuildError: The folder holds more than code.
    """
    run = ctx.run
    named = (run.data, run.model, run.output, run.checkpoints, run.resume_from)
    not_code = excluded | {Path(path) for path in named if path and "://" not in path}
    return Location.of(str(root), "run.program").only(sorted(_code_files(root, not_code)))


def _code_files(root: Path, excluded: set[Path]) -> Iterator[str]:
    size = count = 0
    for folder, folders, files in os.walk(root):
        here = Path(folder)
        folders[:] = [name for name in folders if _is_code(here / name, excluded)]
        for name in files:
            path = here / name
            if not _is_code(path, excluded) or path.suffix == ".pyc" or not path.is_file():
                continue
            size, count = size + path.stat().st_size, count + 1
            if size > _MAX_BYTES or count > _MAX_FILES:
                raise _too_much(root)
            yield path.relative_to(root).as_posix()


def _is_code(path: Path, excluded: set[Path]) -> bool:
    return not path.name.startswith(".") and path.name not in _NOT_CODE and path not in excluded


def _too_much(root: Path) -> BuildError:
    return BuildError(
        f"{root} holds more than {_MAX_BYTES >> 20} MiB or {_MAX_FILES:,} files, which is more than code",
        field="run.program",
        fix="Put the program into a folder of its own; data and models go into run.data and run.model",
    )


def installed_digest() -> str:
    """Hash what of manycpu runs inside a training process."""
    parts = ("node", "recipes", "spec")
    files = [path for part in parts for path in sorted((_PACKAGE / part).rglob("*.py"))]
    source = Location.of(str(_PACKAGE), "run.program").only(
        [path.relative_to(_PACKAGE).as_posix() for path in files]
    )
    return transfer.scan(source).digest
