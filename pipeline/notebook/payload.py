"""Write a function as the program of a run, with the modules beside the notebook that it imports."""

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

_MAX_BYTES: Final = 90 << 20  # of a function; a run accepts no more for its code
_SCRIPT: Final = '''"""Calls the function that travelled with it."""

from pathlib import Path

from manycpu.pipeline.node import function

__tracebackhide__ = True
if __name__ == "__main__":
    function.call(Path(__file__).parent)
else:  # a process that the function spawns
    function.define(Path(__file__).parent)
'''
_SYSTEM_FOLDERS: Final = ("/dev", "/etc", "/proc", "/sys", "/usr")  # every node has them
_MIN_PARTS: Final = 3  # of a path: every node has /tmp and /home
_MAX_CHARACTERS: Final = 500  # of a text that may be a path


def write(folder: Path, call: travel.Call, *, base: Path, data: str | None, same_machine: bool) -> Path:
    """Write a function and its arguments as a program, and return the path of its script.

    Args:
        folder: An empty folder.
        call: The function and its arguments.
        base: The notebook's folder.
        data: Path of the data that the run stages, if it is a path.
        same_machine: Whether the ranks run where the notebook does.

    Raises:
        BadInputError: A variable that the function uses cannot travel, or it takes too much along.
    """
    __tracebackhide__ = True
    (folder / ".gitignore").write_text("!*\n")  # a repository around it may ignore these files
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
    """Return the name of a function's script, which hides no module: ranks import from its folder first.

    >>> script_of(print), script_of(lambda: None)
    ('print-function.py', 'a-function.py')
    """
    name = travel.item_name(function)
    return f"{name if name.isidentifier() else 'a'}-function.py"


def check_call(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Check that a function can be called with its arguments, and that the call does its work.

    Raises:
        BadInputError: It is no function, takes other arguments, or is async or a generator.
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
    except ValueError:  # a builtin without a signature
        return
    except TypeError as error:
        given = f"with {len(args)} argument{'' if len(args) == 1 else 's'}"
        fix = "Give the function's arguments, as a tuple to notebook_launcher: args=(1,)"
        message = f"{travel.item_name(function)} cannot be called {given}: {error}"
        raise BadInputError(message, field="args", fix=fix) from None


def _pickled(call: travel.Call) -> bytes:
    """Pickle a call, or raise an error that names the variable that cannot travel."""
    __tracebackhide__ = True
    _refuse(call.variables, travel.obstacle)
    try:
        pickled = dumps((call.function, call.args))
    except Exception as error:
        _refuse(call.variables, _fails)
        raise BadInputError(f"the function cannot travel: {error}", field="function") from error
    if named := sorted(set(named_only(pickled))):
        message = f"`{named[0]}` travels by name alone, and no rank has it: it is no plain function or class"
        fix = "Define it inside the function, or in a module beside the notebook"
        raise BadInputError(message, field="function", fix=fix)
    if len(pickled) > _MAX_BYTES:
        sizes = {each.name: len(dumps(each.value)) for each in call.variables}
        largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:3]
        named_sizes = ", ".join(f"{name} ({decimal(sizes[name])})" for name in largest)
        raise BadInputError(
            f"the function takes {decimal(len(pickled))} along, and {decimal(_MAX_BYTES)} can travel with it"
            f": {named_sizes}",
            field="function",
            fix="Load it inside the function, from what `data=` stages: os.environ['MANYCPU_DATA']",
        )
    return pickled


def _refuse(variables: list[travel.Variable], fails: Callable[[Any], str | None]) -> None:
    """Raise an error for the first variable that has a part which cannot travel."""
    __tracebackhide__ = True
    deep = fails if fails is _fails else travel.in_any_part(fails)
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
    except Exception as error:  # noqa: BLE001 - objects may raise anything
        return f"cannot be pickled: {error}"
    return None


def _root_of(base: Path, name: str) -> Path | None:
    """Return the folder that has a module: the notebook's or the script's; None if neither has it."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    origin = getattr(sys.modules.get(name), "__file__", None)
    for root in [base, *([Path(script).absolute().parent] if script else [])]:
        if origin is not None and not Path(origin).absolute().is_relative_to(root):
            continue  # an installed module of this name is the one in use
        if (root / f"{name}.py").is_file() or (root / name).is_dir():
            return root
    return None


def paths_of_here(call: travel.Call, base: Path, data: str | None) -> Mapping[str, str]:
    """Find the paths of this machine that a call takes along: text -> the place where it is.

    A relative path below the data is not listed: it also leads to the staged data.
    """
    found: dict[str, str] = {}
    for where, text in travel.texts(call):
        if text not in found and _is_of_here(text, base, data):
            found[text] = where
    return found


def _is_of_here(text: str, base: Path, data: str | None) -> bool:
    if not text.strip(". /") or len(text) > _MAX_CHARACTERS or "\n" in text:
        return False
    path = Path(base, text)
    try:
        if not path.exists():
            return False
    except (OSError, ValueError):
        return False
    place = path.resolve()
    staged = data is not None and not Path(text).is_absolute() and place.is_relative_to(Path(data).resolve())
    return not staged and len(place.parts) >= _MIN_PARTS and not str(place).startswith(_SYSTEM_FOLDERS)
