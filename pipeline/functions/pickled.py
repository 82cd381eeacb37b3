"""Serialise a function by cloudpickle: with the variables of its notebook, and modules beside that."""

import ast
import functools
import inspect
import io
import json
import linecache
import os
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from textwrap import dedent
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

from rich.filesize import decimal

from manycpu.pipeline.functions.program import (
    code_objects,
    globals_of,
    item_name,
    operands,
    script_name,
    write_program,
)
from manycpu.pipeline.node.function import FUNCTION, NOTES, versions
from manycpu.pipeline.spec.errors import BadInputError, require

_MAX_BYTES: Final = 90 << 20  # of a function; a run accepts no more for its code
_MAX_DEPTH: Final = 3  # of containers and attributes that are searched
_MAX_ITEMS: Final = 1000  # of a container that are searched
_MAX_CHARACTERS: Final = 500  # of a text that may be a path
_MIN_PARTS: Final = 3  # of a path: every node has /tmp and /home
_SYSTEM_FOLDERS: Final = ("/dev", "/etc", "/proc", "/sys", "/usr")  # every node has them
_SCRIPT: Final = '''"""Calls the function that travelled with it."""

from pathlib import Path

from manycpu.pipeline.node import function

__tracebackhide__ = True
if __name__ == "__main__":
    function.call(Path(__file__).parent)
else:  # a process that the function spawns
    function.define(Path(__file__).parent)
'''
_CACHED: Final = functools._lru_cache_wrapper  # noqa: SLF001 - of functools.cache too; it has no other name
_DOWNLOADED: Final = {"datasets_modules", "evaluate_modules", "transformers_modules"}
"""Code that Hugging Face's libraries import from their caches, where ranks do not look for modules."""
_LOCKS: Final = {type(threading.Lock()): threading.Lock, type(threading.RLock()): threading.RLock}
_PROCESS_STATES: Final = {"Accelerator", "AcceleratorState", "GradientState", "PartialState"}


@dataclass(frozen=True)
class Call:
    """A call of a function, with all that travels with it."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()

    @cached_property
    def variables(self) -> list[tuple[str, Any]]:
        """The variables that travel, by name: arguments, globals, closures and defaults.

        The name of a variable that another function uses has the name of that function. Functions and classes
        of modules that can be imported do not travel, nor does what they use.
        """
        found = [(f"args[{place}]", value) for place, value in enumerate(self.args)]
        seen: set[int] = set()
        waiting: list[tuple[str, Any]] = [("", self.function), *(("", value) for value in self.args)]
        while waiting:
            user, item = waiting.pop()
            if id(item) in seen:
                continue
            seen.add(id(item))
            for name, value in _used_by(item):
                found.append((f"{name} (which {user} uses)" if user else name, value))
                waiting.append((item_name(value) if callable(value) else name, value))
        # Each value once, by the first name that was found.
        return [*{id(value): (name, value) for name, value in reversed(found)}.values()][::-1]

    @property
    def items(self) -> list[Any]:
        """The function and the values of the variables."""
        return [self.function, *(value for _, value in self.variables)]


def write(folder: Path, call: Call, *, base: Path, data: str | None, same_machine: bool) -> Path:
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
    (folder / FUNCTION).write_bytes(_pickled(call))
    modules = {*_modules(call)}
    # The cells that functions come from: no disk has these files.
    files = {code.co_filename for each in call.items if (code := getattr(each, "__code__", None))}
    lines = {file: linecache.getlines(file) for file in files if not Path(file).is_file()}
    notes = {
        "versions": versions(),
        "sources": {file: text for file, text in lines.items() if text},
        "folder": str(base),
        "data": data,
        "same_machine": same_machine,
        "accelerate": "accelerate" in modules,
    }
    (folder / NOTES).write_text(json.dumps(notes))
    main = getattr(sys.modules["__main__"], "__file__", None)
    roots = [base.resolve(), *([Path(main).resolve().parent] if main else [])]
    script = folder / script_name(call.function)
    write_program(script, _SCRIPT, modules, roots)
    return script


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
            names = globals_of(item.__code__)
            yield from ((name, value) for name, value in item.__globals__.items() if name in names)
            for name, cell in zip(item.__code__.co_freevars, item.__closure__ or (), strict=True):
                with suppress(ValueError):  # not assigned yet
                    yield name, cell.cell_contents
            defaults = [*(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values()]
            yield from ((f"a default of {item.__name__}", value) for value in defaults)
        case _ if isinstance(item, _CACHED):
            yield item.__name__, item.__wrapped__
        case type() if _is_of_the_notebook(item):
            yield from ((base.__name__, base) for base in item.__bases__)
            members = ((name, getattr(value, "__func__", value)) for name, value in vars(item).items())
            yield from ((name, value) for name, value in members if isinstance(value, FunctionType))
        case _ if not isinstance(item, (FunctionType, type)) and _is_of_the_notebook(type(item)):
            yield type(item).__name__, type(item)


def _is_of_the_notebook(item: FunctionType | type) -> bool:
    """Whether a function or class travels by value: it is in no module that ranks can import."""
    return item.__module__ == "__main__" or item.__module__ not in sys.modules


def _modules(call: Call) -> Iterator[str]:
    """List the top-level names of modules that functions and classes come from, or import."""
    for item in call.items:
        if isinstance(item, ModuleType):
            yield item.__name__.split(".")[0]
            continue
        kind = item if isinstance(item, (FunctionType, type)) else type(item)
        yield kind.__module__.split(".")[0]
        for code in code_objects(item.__code__) if isinstance(item, FunctionType) else ():
            yield from (name.split(".")[0] for name in operands(code, "IMPORT_NAME"))


def _pickled(call: Call) -> bytes:
    """Pickle a call, or raise an error that names the variable that cannot travel."""
    __tracebackhide__ = True
    for variable in call.variables:
        for name, part in _places(*variable):
            if why := _obstacle(part):
                raise _refusal(name, why)
    try:
        pickled = dumps((call.function, call.args))
    except BadInputError:
        raise
    except Exception as error:
        for found in filter(None, (_culprit(*variable) for variable in call.variables)):
            raise _refusal(*found) from error
        raise BadInputError(f"the function cannot travel: {error}", field="function") from error
    if len(pickled) > _MAX_BYTES:
        sizes = {name: len(dumps(value)) for name, value in call.variables}
        largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:3]
        named_sizes = ", ".join(f"{name} ({decimal(sizes[name])})" for name in largest)
        raise BadInputError(
            f"the function takes {decimal(len(pickled))} along, and {decimal(_MAX_BYTES)} can travel with it"
            f": {named_sizes}",
            field="function",
            fix="Load it inside the function, from what `data=` stages: os.environ['MANYCPU_DATA']",
        )
    return pickled


def _refusal(name: str, why: str) -> BadInputError:
    fix = "Make it inside the function, where its ranks are, or leave it out of what the function uses"
    return BadInputError(f"`{name}` {why}", field="function", fix=fix)


def dumps(value: Any) -> bytes:
    """Pickle a value by cloudpickle: functions and classes of the notebook and of downloaded code by value.

    ``os.environ`` is pickled by name: each process has its own, with secrets. A free lock and the cache of a
    function are replaced by new ones, so that each rank has its own, as after a fork.

    Raises:
        BadInputError: The pickle would have something of ``__main__`` by name: no other process finds it.
    """
    require("train", "function", "a function that travels")
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if obj is os.environ:
                return getattr, (os, "environ")
            if is_held(obj) is False:
                make = _LOCKS.get(type(obj))
                return (type(obj), (obj.lock_file, obj.timeout)) if make is None else (make, ())
            wrapped: Any = obj.__wrapped__ if isinstance(obj, _CACHED) else None
            if wrapped is not None and _is_of_the_notebook(wrapped):
                size, typed = obj.cache_parameters().values()
                made_of = (wrapped, size, typed, functools._CacheInfo)  # noqa: SLF001
                return type(obj), made_of, dict(vars(obj))  # each rank has a cache of its own
            reduced = super().reducer_override(obj)
            of_main = getattr(obj, "__module__", None) == "__main__" and type(obj) not in self.dispatch_table
            if reduced is NotImplemented and of_main and not isinstance(obj, type):
                reduced = obj.__reduce_ex__(self.proto)
                if isinstance(reduced, str):
                    what = f"`{reduced}` travels by name alone, and no rank has it"
                    fix = "Define it inside the function, or in a module beside the notebook"
                    message = f"{what}: it is no plain function or class"
                    raise BadInputError(message, field="function", fix=fix)
            return reduced

    stream = io.BytesIO()
    by_value = [module for name, module in [*sys.modules.items()] if name.split(".")[0] in _DOWNLOADED]
    for module in by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        Pickler(stream).dump(value)
    finally:
        for module in by_value:
            cloudpickle.unregister_pickle_by_value(module)
    return stream.getvalue()


def is_held(value: Any) -> bool | None:
    """Whether a lock of threading or of the package filelock is held; None if the value is no lock."""
    kind = type(value)
    names = ((base.__module__.split(".")[0], base.__name__) for base in kind.__mro__)
    if ("filelock", "BaseFileLock") in names:
        return bool(value.is_locked)
    if kind not in _LOCKS:
        return None
    if getattr(value, "_is_owned", lambda: False)() or not value.acquire(blocking=False):
        return True
    value.release()
    return False


def _obstacle(value: Any) -> str | None:
    """Return why a value must not travel, even if pickle accepts it; None if no reason is known."""
    if is_held(value):
        return "is a lock that is held"
    if isinstance(value, io.IOBase) and not isinstance(value, (io.BytesIO, io.StringIO)):
        return "is an open file"
    kind = type(value)
    if kind.__module__.split(".")[0] == "accelerate" and kind.__name__ in _PROCESS_STATES:
        return f"is of Accelerate's {kind.__name__}, which is each process's own"
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "Tensor"):
        return None
    tensors = [value] if isinstance(value, torch.Tensor) else []
    if isinstance(value, torch.nn.Module):
        tensors = [*value.parameters(), *value.buffers()]
    devices = (tensor.device for tensor in tensors if tensor.device.type != "cpu")
    if device := next(devices, None):
        return f"is on the device {device}: leave it on the CPU, each rank has its own"
    return None


def _culprit(name: str, value: Any, depth: int = _MAX_DEPTH) -> tuple[str, str] | None:
    """Find the innermost part of a variable that cannot be pickled, and why; None if all of it can."""
    if isinstance(value, (FunctionType, type)):
        return None  # what functions and classes use is checked by its own name
    try:
        dumps(value)
    except BadInputError:
        raise
    except Exception as error:  # noqa: BLE001 - objects may raise anything
        if known := _obstacle(value):
            return name, known
        parts = _parts(value, attributes=True) if depth else ()
        inner = (_culprit(name + path, part, depth - 1) for path, part in parts)
        return next(filter(None, inner), (name, f"cannot be pickled: {error}"))
    return None


def _places(name: str, value: Any, depth: int = _MAX_DEPTH) -> Iterator[tuple[str, Any]]:
    """Yield a value and, if it is a container, what is in it, each after its name."""
    yield name, value
    for path, part in _parts(value) if depth else ():
        yield from _places(name + path, part, depth - 1)


def _parts(value: Any, *, attributes: bool = False) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in [*value.items()][:_MAX_ITEMS])
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{place}]", part) for place, part in enumerate(value[:_MAX_ITEMS]))
    if attributes and hasattr(value, "__dict__") and not isinstance(value, ModuleType):
        yield from ((f".{name}", part) for name, part in vars(value).items())


def model_advice(call: Call) -> str | None:
    """Return advice if a function for XLA's devices builds its model inside; else None."""
    models = {
        kind.__name__
        for kind in call.items
        if isinstance(kind, type)
        and any(
            (base.__module__, base.__name__) == ("torch.nn.modules.module", "Module") for base in kind.__mro__
        )
    }
    try:
        return advice_on_source(inspect.getsource(call.function), models)
    except (OSError, TypeError):  # a partial, or a function without source
        return None


def paths_of_here(call: Call, base: Path, data: str | None) -> Mapping[str, str]:
    """Find the paths of this machine that a call takes along: text -> the place where it is.

    A relative path below the data is not listed: it also leads to the staged data.
    """
    found: dict[str, str] = {}
    for where, text in _texts(call):
        if text not in found and _is_of_here(text, base, data):
            found[text] = where
    return found


def _texts(call: Call) -> Iterator[tuple[str, str]]:
    """List the texts that a function takes along, each after the place where it is."""
    for name, value in [("", call.function), *call.variables]:
        values = [(name, value)]
        if isinstance(value, FunctionType) and _is_of_the_notebook(value):
            constants = (one for code in code_objects(value.__code__) for one in code.co_consts)
            values = [*((value.__name__, constant) for constant in constants), *values]
        for where, whole in values:
            for _, part in _places("", whole):
                if isinstance(part, (str, Path)):
                    yield f"in {where}", str(part)


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


_MODEL: Final = re.compile(r"[A-Z]\w*(?:Model|For[A-Z]\w*)(?:Head)?|Sequential")
_OTHERS: Final = re.compile(r"DataCollator|Tokenizer|Processor|Config|Arguments|Output")
_MAKERS: Final = ("create_model", "from_pretrained", "from_config")


def advice_on_source(source: str, modules: Collection[str] = ()) -> str | None:
    """Explain what it costs that a function builds its model inside; None: it seems to build none.

    This judges by names alone, so it is the text of a warning and no reason to refuse.

    Args:
        source: The function's source.
        modules: Names of classes that are known to be models, such as subclasses of ``torch.nn.Module``.

    >>> advice_on_source("def train(model): model.train()") is None
    True
    >>> advice_on_source("def train(): model = AutoModel.from_pretrained('bert')").partition(":")[0]
    'the function builds its model inside (AutoModel.from_pretrained)'
    """
    try:
        tree = ast.parse(dedent(source))
    except SyntaxError:  # a lambda within a call, or a cell with magic commands
        return None
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    own = (each.name for each in classes if any(_name(base) == "Module" for base in each.bases))
    known = {*modules, *own}
    called = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    call = next((each for each in called if _makes_model(each, known)), None)
    if call is None:
        return None
    return (
        f"the function builds its model inside ({ast.unparse(call)}): every process that runs it holds one "
        "of its own in the host's memory, beside the devices' copy, and builds it again with each call. "
        "Build it once, outside, and pass it in: notebook_launcher(function, (model,))"
    )


def _makes_model(call: ast.expr, known: Collection[str]) -> bool:
    name = _name(call)
    if name in known or name == "create_model":
        return True
    if name in _MAKERS and isinstance(call, ast.Attribute):  # tokenizers and configurations have it too
        name = _name(call.value)
    return bool(_MODEL.fullmatch(name)) and not _OTHERS.search(name)


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
