"""Find the variables of a notebook that a function takes along, and those that cannot travel to its ranks."""

import dis
import inspect
import io
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple

from manycpu.pipeline.notebook import xla
from manycpu.pipeline.notebook.pickling import is_held

__all__ = [
    "Call",
    "Variable",
    "culprit",
    "in_any_part",
    "item_name",
    "model_advice",
    "modules",
    "obstacle",
    "sources",
    "texts",
]

_PROCESS_STATES: Final = {"Accelerator", "AcceleratorState", "GradientState", "PartialState"}
_MODEL: Final = ("torch.nn.modules.module", "Module")
_LOOKUPS: Final = {"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME"}
_IMPORTS: Final = {"IMPORT_NAME"}
_MAX_DEPTH: Final = 3  # of containers and attributes that are searched
_MAX_ITEMS: Final = 1000  # of a container that are searched


class Variable(NamedTuple):
    """A variable that a function uses, or an argument."""

    name: str
    """Its name in the cell; if another function uses it, with the name of that function."""
    value: Any


@dataclass(frozen=True)
class Call:
    """A call of a function, with all that travels with it."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()

    @cached_property
    def variables(self) -> list[Variable]:
        """The variables that travel: arguments, globals, closures and defaults.

        Functions and classes of modules that can be imported do not travel, nor does what they use.
        """
        found = [Variable(f"args[{place}]", value) for place, value in enumerate(self.args)]
        seen: set[int] = set()
        waiting: list[tuple[str, Any]] = [("", self.function), *(("", value) for value in self.args)]
        while waiting:
            user, item = waiting.pop()
            if id(item) in seen:
                continue
            seen.add(id(item))
            for name, value in _used_by(item):
                found.append(Variable(f"{name} (which {user} uses)" if user else name, value))
                waiting.append((item_name(value) if callable(value) else name, value))
        # Each value once, by the first name that was found.
        return [*{id(each.value): each for each in reversed(found)}.values()][::-1]

    @property
    def items(self) -> list[Any]:
        """The function and the values of the variables."""
        return [self.function, *(each.value for each in self.variables)]


def _used_by(item: Any) -> Iterator[tuple[str, Any]]:
    """List by name what a function or class of the notebook uses; nothing for imported ones."""
    match item:
        case MethodType():
            yield from (("self", item.__self__), (item.__name__, item.__func__))
        case partial():
            yield item_name(item.func), item.func
            yield from ((f"args[{place}]", value) for place, value in enumerate(item.args))
            yield from item.keywords.items()
        case FunctionType() if _is_of_the_notebook(item):
            yield from _used_by_function(item)
        case type() if _is_of_the_notebook(item):
            yield from ((base.__name__, base) for base in item.__bases__)
            members = ((name, getattr(value, "__func__", value)) for name, value in vars(item).items())
            yield from ((name, value) for name, value in members if isinstance(value, FunctionType))
        case _ if not isinstance(item, (FunctionType, type)) and _is_of_the_notebook(type(item)):
            yield type(item).__name__, type(item)


def _used_by_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    names = _operands(function.__code__, _LOOKUPS)
    yield from ((name, value) for name, value in function.__globals__.items() if name in names)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            yield name, cell.cell_contents
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    yield from ((f"a default of {function.__name__}", value) for value in defaults)


def _is_of_the_notebook(item: FunctionType | type) -> bool:
    """Whether a function or class travels by value: it is in no module that ranks can import."""
    return item.__module__ == "__main__" or item.__module__ not in sys.modules


def item_name(item: Any) -> str:
    """Return the name of a function or class, or that of the class of any other value.

    >>> item_name(len), item_name(3)
    ('len', 'int')
    """
    return str(getattr(item, "__name__", type(item).__name__))


def _operands(code: CodeType, opnames: set[str]) -> set[str]:
    """Return the operands of some instructions of a function's code, and of the functions in it."""
    return {
        str(instruction.argval)
        for each in _code_objects(code)
        for instruction in dis.get_instructions(each)
        if instruction.opname in opnames
    }


def _code_objects(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_objects(constant)


def obstacle(value: Any) -> str | None:
    """Return why a value must not travel, even if pickle accepts it; None if no reason is known."""
    if is_held(value):
        return "is a lock that is held"
    if isinstance(value, io.IOBase) and not isinstance(value, (io.BytesIO, io.StringIO)):
        return "is an open file"
    kind = type(value)
    if kind.__module__.split(".")[0] == "accelerate" and kind.__name__ in _PROCESS_STATES:
        return f"is of Accelerate's {kind.__name__}, which is each process's own"
    if device := _device(value):
        return f"is on the device {device}: leave it on the CPU, each rank has its own"
    return None


def _device(value: Any) -> str | None:
    """Return the device of a tensor or model that is not on the CPU, without importing torch."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "Tensor"):
        return None
    tensors = [value] if isinstance(value, torch.Tensor) else []
    if isinstance(value, torch.nn.Module):
        tensors = [*value.parameters(), *value.buffers()]
    return next((str(tensor.device) for tensor in tensors if tensor.device.type != "cpu"), None)


def culprit(
    variable: Variable, fails: Callable[[Any], str | None], depth: int = _MAX_DEPTH
) -> tuple[str, str] | None:
    """Find the innermost part of a variable that cannot travel.

    Args:
        variable: The variable.
        fails: Returns why a value cannot travel; None if it can.
        depth: Levels of containers and attributes that are searched.

    Returns:
        The name of the part, and why it cannot travel; None if all of the variable can.
    """
    name, value = variable
    why = fails(value)
    if why is None or isinstance(value, (FunctionType, type)):
        return None  # what functions and classes use is checked by its own name
    if known := obstacle(value):
        return name, known
    for path, part in _parts(value) if depth else ():
        if found := culprit(Variable(name + path, part), fails, depth - 1):
            return found
    return name, why


def in_any_part(fails: Callable[[Any], str | None], depth: int = _MAX_DEPTH) -> Callable[[Any], str | None]:
    """Extend a check of a value to the items of containers, but not to the attributes of objects."""

    def inside(value: Any, levels: int = depth) -> str | None:
        if why := fails(value):
            return why
        parts = (inside(part, levels - 1) for _, part in _items(value)) if levels else ()
        return next(filter(None, parts), None)

    return inside


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    yield from _items(value)
    if hasattr(value, "__dict__") and not isinstance(value, ModuleType):
        yield from ((f".{name}", part) for name, part in vars(value).items())


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in [*value.items()][:_MAX_ITEMS])
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{place}]", part) for place, part in enumerate(value[:_MAX_ITEMS]))


def model_advice(call: Call) -> str | None:
    """Return advice if a function for XLA's devices builds its model inside; else None."""
    classes = [kind for kind in call.items if isinstance(kind, type)]
    models = {
        kind.__name__
        for kind in classes
        if any((base.__module__, base.__name__) == _MODEL for base in kind.__mro__)
    }
    try:
        return xla.model_advice(inspect.getsource(call.function), models)
    except (OSError, TypeError):  # a partial, or a function without source
        return None


def sources(call: Call) -> dict[str, list[str]]:
    """Return the lines of the cells that functions come from, by file name: no disk has these files."""
    files = {code.co_filename for each in call.items if (code := getattr(each, "__code__", None))}
    lines = {file: linecache.getlines(file) for file in files if not Path(file).is_file()}
    return {file: text for file, text in lines.items() if text}


def modules(call: Call) -> Iterator[str]:
    """List the top-level names of modules that functions and classes come from, or import."""
    for item in call.items:
        if isinstance(item, ModuleType):
            yield item.__name__.split(".")[0]
            continue
        kind = item if isinstance(item, (FunctionType, type)) else type(item)
        yield kind.__module__.split(".")[0]
        if isinstance(item, FunctionType):
            yield from (name.split(".")[0] for name in _operands(item.__code__, _IMPORTS))


def texts(call: Call) -> Iterator[tuple[str, str]]:
    """List the texts that a function takes along, each after the place where it is."""
    for name, value in [("", call.function), *call.variables]:
        if isinstance(value, FunctionType) and _is_of_the_notebook(value):
            for code in _code_objects(value.__code__):
                for constant in code.co_consts:
                    yield from ((f"in {value.__name__}", text) for text in _texts_of(constant, _MAX_DEPTH))
        yield from ((f"in {name}", text) for text in _texts_of(value, _MAX_DEPTH))


def _texts_of(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, (str, Path)):
        yield str(value)
    elif depth and isinstance(value, (Mapping, list, tuple)):
        for _, part in _parts(value):
            yield from _texts_of(part, depth - 1)
