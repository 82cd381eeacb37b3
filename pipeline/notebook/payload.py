"""Write a function as the program of a run: pickled by value, with the user's modules that it imports."""

import inspect
import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.filesize import decimal

from manycpu.pipeline.node.function import FUNCTION, NOTES, versions
from manycpu.pipeline.notebook import travel
from manycpu.pipeline.notebook.pickling import dumps, named_only
from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.program import copy_files

__all__ = ["check_call", "paths_of_here", "script_of", "write"]

_LARGEST: Final = 90 << 20  # bytes: what a run takes for code
_SCRIPT: Final = '''"""Calls the function that travelled with it."""

from pathlib import Path

from manycpu.pipeline.node import function

__tracebackhide__ = True
if __name__ == "__main__":
    function.call(Path(__file__).parent)
else:  # a process that the function spawns
    function.define(Path(__file__).parent)
'''
_EVERYWHERE: Final = ("/dev", "/etc", "/proc", "/sys", "/usr")  # what nodes have too
_SHORTEST: Final = 3  # parts of a path: /tmp and /home are everywhere, too


def write(folder: Path, call: travel.Call, *, base: Path, data: str | None, same_machine: bool) -> Path:
    """Write a function and its arguments as a program; the path of its script.

    Args:
        folder: Where it is written: an empty folder.
        call: The function and its arguments.
        base: The notebook's folder.
        data: Path of the data that the run stages, where it is a path.
        same_machine: Whether the ranks run where the notebook does.

    Raises:
        BadInputError: A variable that it uses cannot travel, or it takes too much along.
    """
    __tracebackhide__ = True
    (folder / ".gitignore").write_text("!*\n")  # whatever a repository around it leaves out
    (folder / FUNCTION).write_bytes(_pickled(call))
    modules = {*travel.modules(call)}
    notes = {
        "versions": versions(),
        "sources": travel.sources(call),
        "folder": str(base),
        "data": data,
        "same_machine": same_machine,
        "accelerate": "accelerate" in modules,
    }
    (folder / NOTES).write_text(json.dumps(notes))
    copy_files(modules, partial(_root_of, base), folder)
    script = folder / script_of(call.function)
    script.write_text(_SCRIPT)
    return script


def script_of(function: Callable[..., Any]) -> str:
    """Name a function's script: as no module is named, for its folder comes first where ranks import.

    >>> script_of(print), script_of(lambda: None)
    ('print-function.py', 'a-function.py')
    """
    name = travel.item_name(function)
    return f"{name if name.isidentifier() else 'a'}-function.py"


def check_call(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """See that a function can be called with its arguments, and does its work when it is.

    Raises:
        BadInputError: It is none, or takes others, or what it returns does the work.
    """
    if not callable(function):
        fix = "Give the function itself: launch(training_loop, 1, 2)"
        raise BadInputError(f"{function!r} cannot be called", field="function", fix=fix)
    if not isinstance(args, tuple | list):
        raise BadInputError(
            f"args are {args!r}", field="args", fix="Write them as a tuple: args=(1, 2), or (1,)"
        )
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if any(is_kind(function) for is_kind in kinds):
        fix = "Wrap it into a function that does the work"
        name = travel.item_name(function)
        raise BadInputError(
            f"{name} is async or yields: a call of it does nothing", field="function", fix=fix
        )
    try:
        inspect.signature(function).bind(*args)
    except ValueError:  # of a builtin nobody knows
        return
    except TypeError as error:
        given = f"with {len(args)} argument{'' if len(args) == 1 else 's'}"
        fix = "Give the function's arguments, as a tuple to notebook_launcher: args=(1,)"
        message = f"{travel.item_name(function)} cannot be called {given}: {error}"
        raise BadInputError(message, field="args", fix=fix) from None


def _pickled(call: travel.Call) -> bytes:
    __tracebackhide__ = True
    _refuse(call.variables, travel.reason_to_stay)
    try:
        pickled = dumps((call.function, call.args))
    except Exception as error:
        _refuse(call.variables, _fails)
        raise BadInputError(f"the function cannot travel: {error}", field="function") from error
    if named := sorted(set(named_only(pickled))):
        message = f"`{named[0]}` travels by name alone, and no rank has it: it is no plain function or class"
        fix = "Define it inside the function, or in a module beside the notebook"
        raise BadInputError(message, field="function", fix=fix)
    if len(pickled) > _LARGEST:
        raise _too_much(len(pickled), call.variables)
    return pickled


def _refuse(variables: list[travel.Variable], fails: Callable[[Any], str | None]) -> None:
    """Raise for the first variable of which a part cannot travel."""
    __tracebackhide__ = True
    deep = fails if fails is _fails else travel.anywhere(fails)
    for variable in variables:
        if found := travel.culprit(variable, deep):
            name, why = found
            fix = (
                "Make it inside the function, where its ranks are, or leave it out of what the function uses"
            )
            raise BadInputError(f"`{name}` {why}", field="function", fix=fix)


def _fails(value: Any) -> str | None:
    try:
        dumps(value)
    except Exception as error:  # noqa: BLE001 - whatever an object may raise
        return f"cannot be pickled: {error}"
    return None


def _too_much(size: int, variables: list[travel.Variable]) -> BadInputError:
    sizes = {each.name: len(dumps(each.value)) for each in variables}
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:3]
    named = ", ".join(f"{name} ({decimal(sizes[name])})" for name in largest)
    return BadInputError(
        f"the function takes {decimal(size)} along, and {decimal(_LARGEST)} can travel with it: {named}",
        field="function",
        fix="Load it inside the function, from what `data=` stages: os.environ['MANYCPU_DATA']",
    )


def _root_of(base: Path, name: str) -> Path | None:
    """Find a module in the notebook's folder or a script's own; None where neither has it."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    origin = getattr(sys.modules.get(name), "__file__", None)
    for root in [base, *([Path(script).absolute().parent] if script else [])]:
        if origin is not None and not Path(origin).absolute().is_relative_to(root):
            continue  # it is installed, whatever lies here by its name
        if (root / f"{name}.py").is_file() or (root / name).is_dir():
            return root
    return None


def paths_of_here(call: travel.Call, base: Path, data: str | None) -> Mapping[str, str]:
    """Find the paths of this machine that a call takes along: text -> where it stands.

    Relative ones below the data lead to where it is staged, and are none of these.
    """
    found: dict[str, str] = {}
    for where, text in travel.texts(call):
        if text not in found and _is_of_here(text, base, data):
            found[text] = where
    return found


def _is_of_here(text: str, base: Path, data: str | None) -> bool:
    if not text.strip(". /") or len(text) > 500 or "\n" in text:  # noqa: PLR2004 - no path is as long
        return False
    path = Path(base, text)
    try:
        if not path.exists():
            return False
    except (OSError, ValueError):
        return False
    place = path.resolve()
    staged = data is not None and not Path(text).is_absolute() and place.is_relative_to(Path(data).resolve())
    return not staged and len(place.parts) >= _SHORTEST and not str(place).startswith(_EVERYWHERE)
