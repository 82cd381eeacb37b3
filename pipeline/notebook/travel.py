"""What a function takes along: variables of the notebook that it uses, and which of them cannot travel."""

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

from manycpu.pipeline.notebook.pickling import is_held
from manycpu.pipeline.spec import xla

__all__ = [
    "Call",
    "Variable",
    "anywhere",
    "culprit",
    "item_name",
    "model_advice",
    "modules",
    "reason_to_stay",
    "sources",
    "texts",
]

_OF_A_PROCESS: Final = {"Accelerator", "AcceleratorState", "GradientState", "PartialState"}
_MODEL: Final = ("torch.nn.modules.module", "Module")
_LOOKUPS: Final = {"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME"}
_DEPTH: Final = 3  # containers in containers, and attributes, in which a culprit is looked for
_MOST: Final = 1000  # items of a container that are looked at


class Variable(NamedTuple):
    """A variable that a function uses, or an argument."""

    name: str
    """As the cell has it; of one that another function uses, with that one's name."""
    value: Any


@dataclass(frozen=True)
class Call:
    """A call of a function, with all that travels with it."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()

    @cached_property
    def variables(self) -> list[Variable]:
        """The variables that travel: arguments, globals, closures and defaults.

        What is defined in a module that can be imported is not taken along, and neither is what it uses.
        """
        return _taken_along(self.function, self.args)

    @property
    def items(self) -> list[Any]:
        """The function and the values of the variables."""
        return [self.function, *(each.value for each in self.variables)]


def _taken_along(function: Callable[..., Any], args: tuple[Any, ...]) -> list[Variable]:
    found = [Variable(f"args[{place}]", value) for place, value in enumerate(args)]
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", function), *(("", value) for value in args)]
    while waiting:
        user, item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        for name, value in _used_by(item):
            named = f"{name} (which {user} uses)" if user else name
            found.append(Variable(named, value))
            waiting.append((item_name(value) if callable(value) else name, value))
    return [*{id(each.value): each for each in reversed(found)}.values()][::-1]


def _used_by(item: Any) -> Iterator[tuple[str, Any]]:
    """List what a function or class of the notebook uses, by name; nothing of what is imported by name."""
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
    names = set(_names(function.__code__))
    yield from ((name, value) for name, value in function.__globals__.items() if name in names)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            yield name, cell.cell_contents
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    yield from ((f"a default of {function.__name__}", value) for value in defaults)


def _is_of_the_notebook(item: FunctionType | type) -> bool:
    """Whether a function or class travels by value: no module has it that could be imported."""
    return item.__module__ == "__main__" or item.__module__ not in sys.modules


def item_name(item: Any) -> str:
    """Name a function or class; of anything else its class.

    >>> item_name(len), item_name(3)
    ('len', 'int')
    """
    return str(getattr(item, "__name__", type(item).__name__))


def _names(code: CodeType) -> Iterator[str]:
    """List the names that code looks up outside of itself: not those of attributes."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in _LOOKUPS:
            yield str(instruction.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def reason_to_stay(value: Any) -> str | None:
    """Say why a value cannot travel, whatever pickle thinks of it; None where nothing is known against it."""
    if is_held(value):
        return "is a lock that is held"
    if isinstance(value, io.IOBase) and not isinstance(value, (io.BytesIO, io.StringIO)):
        return "is an open file"
    kind = type(value)
    if kind.__module__.split(".")[0] == "accelerate" and kind.__name__ in _OF_A_PROCESS:
        return f"is of Accelerate's {kind.__name__}, which is each process's own"
    if device := _device(value):
        return f"is on the device {device}: leave it on the CPU, each rank has its own"
    return None


def _device(value: Any) -> str | None:
    """Find the device of a tensor or model where it is no CPU, without importing torch."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "Tensor"):
        return None
    tensors = [value] if isinstance(value, torch.Tensor) else []
    if isinstance(value, torch.nn.Module):
        tensors = [*value.parameters(), *value.buffers()]
    return next((str(tensor.device) for tensor in tensors if tensor.device.type != "cpu"), None)


def culprit(variable: Variable, fails: Callable[[Any], str | None]) -> tuple[str, str] | None:
    """Find the innermost part of a variable that cannot travel.

    Args:
        variable: The variable.
        fails: Says why a value cannot travel; None where it can.

    Returns:
        What it is called, and why; None where all of it travels.
    """
    return _culprit(variable.name, variable.value, fails, _DEPTH)


def anywhere(fails: Callable[[Any], str | None], depth: int = _DEPTH) -> Callable[[Any], str | None]:
    """Extend what is said of a value to what it contains; what an object does with its own is its affair."""

    def inside(value: Any, levels: int = depth) -> str | None:
        if why := fails(value):
            return why
        parts = (inside(part, levels - 1) for _, part in _items(value)) if levels else ()
        return next(filter(None, parts), None)

    return inside


def _culprit(name: str, value: Any, fails: Callable[[Any], str | None], depth: int) -> tuple[str, str] | None:
    why = fails(value)
    if why is None or isinstance(value, (FunctionType, type)):
        return None  # of functions and classes, what they use is looked at by its own name
    if known := reason_to_stay(value):
        return name, known
    inner = (_culprit(name + path, part, fails, depth - 1) for path, part in _parts(value) if depth)
    return next((found for found in inner if found), (name, why))


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    yield from _items(value)
    if hasattr(value, "__dict__") and not isinstance(value, ModuleType):
        yield from ((f".{name}", part) for name, part in vars(value).items())


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in [*value.items()][:_MOST])
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{place}]", part) for place, part in enumerate(value[:_MOST]))


def model_advice(call: Call) -> str | None:
    """Tell what it costs that a function for XLA's devices builds its model inside; None where none does."""
    models = {kind.__name__ for kind in call.items if isinstance(kind, type) and _is_model(kind)}
    try:
        return xla.model_advice(inspect.getsource(call.function), models)
    except (OSError, TypeError):  # a partial, or what was typed in no cell
        return None


def _is_model(kind: type) -> bool:
    return any((base.__module__, base.__name__) == _MODEL for base in kind.__mro__)


def sources(call: Call) -> dict[str, list[str]]:
    """Collect the lines of the cells that functions come from: their files are on no disk."""
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
            yield from _imported(item.__code__)


def _imported(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            yield str(instruction.argval).split(".")[0]
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _imported(inner)


def texts(call: Call) -> Iterator[tuple[str, str]]:
    """List the texts that a function takes along, each with where it stands."""
    for name, value in [("", call.function), *call.variables]:
        if isinstance(value, FunctionType) and _is_of_the_notebook(value):
            yield from ((f"in {value.__name__}", text) for text in _constants(value.__code__))
        yield from ((f"in {name}", text) for text in _texts_of(value, _DEPTH))


def _constants(code: CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _constants(constant)
        yield from _texts_of(constant, _DEPTH)


def _texts_of(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, (str, Path)):
        yield str(value)
    elif depth and isinstance(value, (Mapping, list, tuple)):
        for _, part in _parts(value):
            yield from _texts_of(part, depth - 1)
