"""What both forms of a function's program have in common: the names it uses, its modules and its folder."""

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
    """Yield code, and that of the functions and classes in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from code_objects(constant)


def operands(code: CodeType, *opnames: str) -> dict[str, None]:
    """Return the operands of some instructions of code, in their order; not of the functions in it."""
    found = (one for one in dis.get_instructions(code) if one.opname in opnames)
    return dict.fromkeys(str(one.argval) for one in found)


def globals_of(code: CodeType) -> set[str]:
    """Return the global names that code uses, also in the functions and classes in it."""
    return {
        name
        for each in code_objects(code)
        for name in operands(each, *_LOOKUPS).keys() - operands(each, "STORE_NAME").keys()
    }


def does_nothing(function: Callable[..., Any]) -> bool:
    """Whether a call of a function does not run it: it is a generator, or async."""
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    return any(is_kind(function) for is_kind in kinds)


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
    return f"{name if name.isidentifier() else 'a'}-function.py"


def write_program(script: Path, text: str, modules: Collection[str], roots: Collection[Path]) -> None:
    """Write a program, and beside it those of its modules that come from some folders, with their imports."""
    script.parent.mkdir(parents=True, exist_ok=True)
    (script.parent / ".gitignore").write_text("!*\n")  # a repository around it may ignore these files
    script.write_text(text)
    copy_files({*modules}, lambda name: root_of(name, roots), script.parent)


def root_of(module: str, roots: Collection[Path]) -> Path | None:
    """Return that of some folders from which a module is copied; None: ranks have it installed."""
    if module in sys.stdlib_module_names or module == "manycpu":
        return None
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):  # ValueError: a module object that was made by hand
        spec = None
    if spec is None:  # only the function itself imports it, in the ranks
        beside = (root for root in roots if (root / f"{module}.py").is_file() or (root / module).is_dir())
        return next(beside, None)
    places = [*(spec.submodule_search_locations or ())] or [spec.origin if spec.has_location else None]
    if places[0] is None:
        return None
    place = Path(places[0]).resolve().parent
    return place if place in roots and not _INSTALL_FOLDERS & {*place.parts} else None
