"""Find the names that code uses, and write a function's program with its modules; for source and pickles."""

import dis
import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import CodeType
from typing import Any, Final

from manycpu.pipeline.spec.program import copy_files

_LOOKUPS: Final = (
    *("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"),
    *("STORE_GLOBAL", "DELETE_GLOBAL"),
)
_INSTALL_FOLDERS: Final = {"dist-packages", "site-packages"}


def code_objects(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object, and those of the functions and classes in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from code_objects(constant)


def operands(code: CodeType, *opnames: str) -> dict[str, None]:
    """Return the distinct operands of the instructions ``opnames`` in code, in their order.

    Code of nested functions is not searched. The result is a dictionary because that keeps the order.

    >>> operands(compile("import os, sys", "", "exec"), "IMPORT_NAME")
    {'os': None, 'sys': None}
    """
    selected = [instruction for instruction in dis.get_instructions(code) if instruction.opname in opnames]
    return dict.fromkeys(str(instruction.argval) for instruction in selected)


def globals_of(code: CodeType) -> set[str]:
    """Return the global names that code reads, assigns or deletes, also in its functions and classes."""
    names: set[str] = set()
    for part in code_objects(code):
        defined: set[str] = set()  # assigned so far in this part, such as attributes in a class body
        for instruction in dis.get_instructions(part):
            if instruction.opname == "STORE_NAME":
                defined.add(instruction.argval)
            elif instruction.opname in _LOOKUPS and instruction.argval not in defined:
                names.add(instruction.argval)
    return names


def is_generator_or_async(function: Callable[..., Any]) -> bool:
    """Whether a call of a function does not run it: it is a generator, or async."""
    checks = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    return any(is_kind(function) for is_kind in checks)


def item_name(item: Any) -> str:
    """Return the name of a function or class, or that of the class of any other value.

    >>> item_name(len), item_name(3)
    ('len', 'int')
    """
    return str(getattr(item, "__name__", type(item).__name__))


def script_name(function: Callable[..., Any]) -> str:
    """Return the name of a function's script, which hides no module: ranks import from its folder first.

    >>> script_name(print), script_name(lambda: None)
    ('print-function.py', 'a-function.py')
    """
    name = item_name(function)
    # With its hyphen, it is the name of no module.
    return f"{name if name.isidentifier() else 'a'}-function.py"


def write_program(script: Path, text: str, modules: Collection[str], roots: Collection[Path]) -> None:
    """Write a program, and copy beside it the user's own modules that it imports, directly or through others.

    Args:
        script: Path of the program.
        text: Its source.
        modules: Top-level names of the modules that it imports.
        roots: Folders of the user's own modules; all other modules are installed where the ranks run.
    """
    script.parent.mkdir(parents=True, exist_ok=True)
    # A .gitignore of a folder around it may leave these files out of the run's code: this one keeps them.
    (script.parent / ".gitignore").write_text("!*\n")
    script.write_text(text, encoding="utf-8")
    copy_files({*modules}, root_of=lambda name: _root_of(name, roots), folder=script.parent)


def _root_of(module: str, roots: Collection[Path]) -> Path | None:
    """Return which of the folders ``roots`` a module is copied from; None: it is not copied."""
    if module in sys.stdlib_module_names or module == "manycpu":
        return None
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):  # ValueError: a module object that was made by hand
        spec = None
    if spec is None:  # this process does not find it; ranks find what is copied beside the program
        for root in roots:
            if (root / f"{module}.py").is_file() or (root / module).is_dir():
                return root
        return None
    if spec.submodule_search_locations:
        location = [*spec.submodule_search_locations][0]  # noqa: RUF015 - a namespace's has no index
    elif spec.has_location and spec.origin:
        location = spec.origin
    else:  # built into Python
        return None
    folder = Path(location).resolve().parent
    # A root may be the site-packages of an environment: ranks have their own.
    is_installed = bool(_INSTALL_FOLDERS & {*folder.parts})
    return folder if folder in roots and not is_installed else None
