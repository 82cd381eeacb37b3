"""Modules of the user's own that a program imports, and that are in a folder around its code."""

import ast
import re
from collections.abc import Iterable, Iterator
from typing import Final

from manycpu.pipeline.spec.errors import BadInputError, Finding
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.targets.program_code import has_module, installed, is_project, main_file, program_of

__all__ = ["findings", "hint"]

_MISSING: Final = re.compile(r"ModuleNotFoundError: No module named '(\w+)")
_SOURCES: Final = "src"  # where projects keep what they install


def findings(ctx: RunContext) -> Iterator[Finding]:
    """Yield a warning for each module that the program's main file imports and its code lacks.

    Raises:
        BadInputError: ``run.code`` is no folder around the program.
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
    """Say what would have a failed program find a module of the user's own; None where it missed none.

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
    """Find a module around the code, up to the root of the project: where it is, and what to do."""
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
    """List the modules that a file surely imports, by their first name: none of functions, tries and ifs."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0], node.lineno
