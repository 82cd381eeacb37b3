"""Find modules that a program imports from a folder around its code, and that do not travel with it."""

import ast
import re
from collections.abc import Iterable, Iterator
from typing import Final

from manycpu.pipeline.spec.errors import BadInputError, Finding
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.targets.program_code import has_module, installed, is_project, main_file, program_of

__all__ = ["findings", "hint"]

_MISSING: Final = re.compile(r"ModuleNotFoundError: No module named '(\w+)")
_SOURCES: Final = "src"  # folder in which a project may keep its packages


def findings(ctx: RunContext) -> Iterator[Finding]:
    """Yield a warning for each module that the program's main file imports and its code lacks.

    Raises:
        BadInputError: ``run.code`` is not a folder around the program.
    """
    file = main_file(ctx.run, ctx.base)
    if file is None:
        return
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return
    seen: set[str] = set()
    for name, line in _imported(tree.body):
        if name not in seen and not installed(name) and (found := _outside(ctx, name)):
            seen.add(name)
            message, fix = found
            yield Finding("run.code", f"{file.name}:{line}: {message}", fix, fatal=False)


def hint(ctx: RunContext, lines: Iterable[str]) -> str | None:
    """Say how a failed program can find a module that is around its code; None: it missed no such module.

    Args:
        ctx: The run.
        lines: The last lines of the rank that failed.
    """
    names = [match[1] for line in lines if (match := _MISSING.search(line))]
    try:
        found = _outside(ctx, names[-1]) if names else None
    except BadInputError:
        return None
    return found and ". ".join(found)


def _outside(ctx: RunContext, module: str) -> tuple[str, str] | None:
    """Find a module in the folders around the code, up to the project root; returns its place and a fix."""
    root, program = program_of(ctx)
    if root is None or any(has_module(folder, module) for folder in (root, (root / program[-1]).parent)):
        return None
    for folder in root.parents:
        for place in (folder, folder / _SOURCES):
            if has_module(place, module):
                way = "" if place == folder else f" and run.env to {{PYTHONPATH: {_SOURCES}}}"
                return (
                    f"{module} is in {place}, and the code is {root} alone",
                    f"Set run.code to {folder}{way}",
                )
        if is_project(folder):
            return None
    return None


def _imported(body: Iterable[ast.stmt]) -> Iterator[tuple[str, int]]:
    """List the top-level modules that a file always imports: none in functions, and none below try or if."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0], node.lineno
