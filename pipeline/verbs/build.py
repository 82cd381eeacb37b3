"""build: freeze the code. Locally an image is a snapshot of the program's folder, named by its content."""

import os
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from manycpu.pipeline import transfer
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.spec import program
from manycpu.pipeline.spec.errors import BuildError
from manycpu.pipeline.verbs.context import RunContext
from manycpu.pipeline.verbs.hosts import deliver

__all__ = ["Built", "build"]

_DIGITS = 16
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


def build(ctx: RunContext) -> Built:
    """Snapshot the program's folder, or name the installed code.

    Raises:
        BuildError: The folder holds more than code.
    """
    with ctx.ledger.timed("build") as record:
        root, arguments = _program(ctx)
        if root is None:
            digest, code = _installed_digest(), None
            record.result = "reused"
        else:
            code, digest, reused = _snapshot(ctx, root)
            record.result = "reused" if reused else "done"
        with ctx.ledger.update() as (entry, _):
            entry.code = code
            entry.digests["code"] = digest
        return Built(code=code, program=arguments, digest=digest)


def _program(ctx: RunContext) -> tuple[Path | None, tuple[str, ...]]:
    """Find the folder to snapshot, and Python's arguments that run the program from there."""
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


def _snapshot(ctx: RunContext, root: Path) -> tuple[str, str, bool]:
    files = sorted(_code_files(root, _not_code(ctx)))
    source = Location.of(str(root), "run.program").only(files)
    digest = transfer.identity(source)
    folder = ctx.home / "code" / digest[:_DIGITS]
    before = transfer.staged(folder)
    if before is None:
        transfer.fetch(source, folder)
    delivered = deliver(ctx, folder)
    return str(folder), digest, before is not None and not delivered


def _not_code(ctx: RunContext) -> set[Path]:
    run = ctx.run
    named = (run.data, run.model, run.output, run.checkpoints, run.resume_from)
    return {Path(path) for path in named if path and "://" not in path} | {ctx.home}


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


def _installed_digest() -> str:
    """Hash what of manycpu runs inside a training process."""
    parts = ("node", "recipes", "spec")
    files = [path for part in parts for path in sorted((_PACKAGE / part).rglob("*.py"))]
    source = Location.of(str(_PACKAGE), "run.program").only(
        [path.relative_to(_PACKAGE).as_posix() for path in files]
    )
    return transfer.scan(source).digest
