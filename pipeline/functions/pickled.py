"""Serialise a function by cloudpickle, with the variables of its notebook and the modules beside it."""

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
from types import CodeType, FunctionType, MethodType, ModuleType
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
from manycpu.pipeline.node import accelerate_world
from manycpu.pipeline.node.function import FUNCTION, NOTES, versions
from manycpu.pipeline.spec.errors import BadInputError, require

_MAX_BYTES: Final = 90 << 20  # of a function; a run accepts no more for its code
_MAX_DEPTH: Final = 3  # levels of nested containers and attributes that are searched
_MAX_ITEMS: Final = 1000  # of a container that are searched
_MAX_CHARACTERS: Final = 500  # of a text that may be a path
_MIN_PARTS: Final = 3  # of a path: every node has /tmp and /home
_SYSTEM_FOLDERS: Final = ("/dev/", "/etc/", "/proc/", "/sys/", "/usr/")  # every node has them
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
    """A call of a function; the variables of the notebook that it uses travel with it, in one pickle."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()

    @cached_property
    def variables(self) -> list[tuple[str, Any]]:
        """The variables that travel, each with its name: arguments, globals, closures and defaults.

        If another function than the called one uses a variable, the name says so: ``rate (which loss uses)``.
        Functions and classes of modules that can be imported do not travel, nor does what they use.
        """
        variables = [(f"args[{place}]", value) for place, value in enumerate(self.args)]
        searched: set[int] = set()
        # Pairs: the name of an item, which may use others, and the item. Empty: the function, or an argument.
        to_search: list[tuple[str, Any]] = [("", self.function), *(("", value) for value in self.args)]
        while to_search:
            user, item = to_search.pop()
            if id(item) in searched:
                continue
            searched.add(id(item))
            for name, value in _used_by(item):
                variables.append((f"{name} (which {user} uses)" if user else name, value))
                to_search.append((item_name(value) if callable(value) else name, value))
        # A value that has several names is listed once, by the first one.
        by_id: dict[int, tuple[str, Any]] = {}
        for name, value in variables:
            by_id.setdefault(id(value), (name, value))
        return [*by_id.values()]


def write(folder: Path, call: Call, *, base: Path, data: str | None, same_machine: bool) -> Path:
    """Write a function and its arguments as a program, and return the path of its script.

    Args:
        folder: An empty folder.
        call: The function and its arguments.
        base: The notebook's folder.
        data: Path of the data that the run stages; None: it is no path, or there is none.
        same_machine: Whether the ranks run on the notebook's machine.

    Raises:
        BadInputError: A variable that the function uses cannot travel, or the pickle is above 90 MiB.
    """
    __tracebackhide__ = True  # IPython leaves this frame out of tracebacks
    travelling: list[Any] = []  # filled by the next call: each object in the pickle, also code and modules
    (folder / FUNCTION).write_bytes(_pickled(call, travelling))
    modules = {*_modules_of(travelling)}
    # Cells of a notebook are no files on a disk: tracebacks of the ranks need their source.
    cell_sources: dict[str, list[str]] = {}
    for code in travelling:
        if isinstance(code, CodeType) and not Path(code.co_filename).is_file():
            cell_sources[code.co_filename] = linecache.getlines(code.co_filename)
    notes = {
        "versions": versions(),
        "sources": {file: lines for file, lines in cell_sources.items() if lines},
        "folder": str(base),
        "data": data,
        "same_machine": same_machine,
        "accelerate": "accelerate" in modules,
    }
    (folder / NOTES).write_text(json.dumps(notes))
    # Modules beside the notebook, or beside the script that runs now, are copied for the ranks.
    roots = [base.resolve()]
    main_file = getattr(sys.modules["__main__"], "__file__", None)
    if main_file:
        roots.append(Path(main_file).resolve().parent)
    script = folder / script_name(call.function)
    write_program(script, _SCRIPT, modules, roots)
    return script


def _used_by(item: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each thing that a function, class or object of the notebook uses.

    Yields nothing for a function or class of a module that can be imported: ranks import it too.
    """
    match item:
        case MethodType():
            yield from (("self", item.__self__), (item.__name__, item.__func__))
        case partial():
            yield item_name(item.func), item.func
            yield from ((f"args[{place}]", value) for place, value in enumerate(item.args))
            yield from item.keywords.items()
        case FunctionType() if _travels_by_value(item):
            names = globals_of(item.__code__)
            yield from ((name, value) for name, value in item.__globals__.items() if name in names)
            for name, cell in zip(item.__code__.co_freevars, item.__closure__ or (), strict=True):
                with suppress(ValueError):  # not assigned yet
                    yield name, cell.cell_contents
            defaults = [*(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values()]
            yield from ((f"a default of {item.__name__}", value) for value in defaults)
        case _ if isinstance(item, _CACHED):
            yield item.__name__, item.__wrapped__
        case type() if _travels_by_value(item):
            yield from ((base.__name__, base) for base in item.__bases__)
            for name, member in vars(item).items():
                method = getattr(member, "__func__", member)  # of a class method or a static method
                if isinstance(method, FunctionType):
                    yield name, method
        # An object of a class of the notebook; functions and classes that come here are imported.
        case _ if not isinstance(item, (FunctionType, type)) and _travels_by_value(type(item)):
            yield type(item).__name__, type(item)


def _travels_by_value(item: FunctionType | type) -> bool:
    """Whether a function or class travels by value: it is in no module that ranks can import."""
    return item.__module__ == "__main__" or item.__module__ not in sys.modules


def _modules_of(items: Collection[Any]) -> Iterator[str]:
    """Yield the top-level names of the modules that pickled objects come from, or that functions import."""
    for item in items:
        module = item.__name__ if isinstance(item, ModuleType) else getattr(item, "__module__", None)
        if isinstance(module, str):  # not that of a function made by hand
            yield module.split(".")[0]
        if isinstance(item, FunctionType):  # what it imports while it runs
            for code in code_objects(item.__code__):
                yield from (name.split(".")[0] for name in operands(code, "IMPORT_NAME"))


def _pickled(call: Call, travelling: list[Any]) -> bytes:
    """Pickle a call, or raise BadInputError with the name of the variable that cannot travel.

    Adds to ``travelling`` each object in the pickle but plain texts, numbers and containers.
    """
    __tracebackhide__ = True  # IPython leaves this frame out of tracebacks
    # First refuse what pickle may accept but a rank cannot use, such as a tensor on a device.
    for variable in call.variables:
        for name, part in _with_contents(*variable):
            if reason := _reason_against(part):
                raise _refusal(name, reason)
    try:
        pickled = dumps((call.function, call.args), travelling)
    except BadInputError:  # it says already what cannot travel
        raise
    except Exception as error:
        for variable in call.variables:
            unpicklable = _innermost_unpicklable(*variable)
            if unpicklable is not None:
                raise _refusal(*unpicklable) from error
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


def _refusal(name: str, reason: str) -> BadInputError:
    fix = "Make it inside the function, where its ranks are, or leave it out of what the function uses"
    return BadInputError(f"`{name}` {reason}", field="function", fix=fix)


def dumps(value: Any, travelling: list[Any] | None = None) -> bytes:
    """Pickle a value by cloudpickle: functions and classes of the notebook and of downloaded code by value.

    ``os.environ`` is pickled by name: each process has its own, with secrets. A free lock and the cache of a
    function are replaced by new ones, so that each rank has its own, as after a fork.

    Args:
        value: The value.
        travelling: Each object in the pickle but plain texts, numbers and containers is added to this list.

    Raises:
        BadInputError: Something of ``__main__`` would be pickled by name, and no other process would find it.
    """
    require("train", "function", "a function that travels")
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            """Return how to rebuild an object: a callable, its arguments, and sometimes attributes."""
            if travelling is not None:
                travelling.append(obj)
            if reason := _reason_within(obj):  # the caller of dumps finds the variable that has the object
                raise TypeError(f"its {type(obj).__name__} {reason}")
            if own := _own_of_each_process(obj):
                return own
            rebuild = super().reducer_override(obj)
            is_of_main = getattr(obj, "__module__", None) == "__main__"
            has_own_reducer = type(obj) in self.dispatch_table
            # NotImplemented: cloudpickle leaves the object to pickle. That would call __reduce_ex__ too, but
            # accept a name as its answer: it is in this process' __main__, and not in that of a rank.
            if rebuild is NotImplemented and is_of_main and not has_own_reducer and not isinstance(obj, type):
                rebuild = obj.__reduce_ex__(self.proto)
                if isinstance(rebuild, str):  # a name in __main__
                    reason = "travels by name alone, and no rank has it: it is no plain function or class"
                    fix = "Define it inside the function, or in a module beside the notebook"
                    raise BadInputError(f"`{rebuild}` {reason}", field="function", fix=fix)
            return rebuild

    stream = io.BytesIO()
    downloaded = [module for name, module in [*sys.modules.items()] if name.split(".")[0] in _DOWNLOADED]
    for module in downloaded:
        cloudpickle.register_pickle_by_value(module)
    try:
        Pickler(stream).dump(value)
    finally:
        for module in downloaded:
            cloudpickle.unregister_pickle_by_value(module)
    return stream.getvalue()


def _own_of_each_process(obj: Any) -> tuple[Any, ...] | None:
    """Return how a rank makes its own object in place of this one; None: the object itself is pickled.

    The value has the form of ``__reduce__``: a callable, its arguments, and sometimes attributes.
    """
    if obj is os.environ:
        return getattr, (os, "environ")
    if _is_partial_state(obj):  # of TrainingArguments, which ask it for the rank
        return accelerate_world.own_state, (type(obj),)
    if is_held(obj) is False:  # a free lock
        if type(obj) in _LOCKS:
            return _LOCKS[type(obj)], ()
        return type(obj), (obj.lock_file, obj.timeout)  # of filelock
    if isinstance(obj, _CACHED):  # a function with a cache, which stays here
        function: Any = obj.__wrapped__
        if _travels_by_value(function):
            max_size, typed = obj.cache_parameters().values()
            arguments = (function, max_size, typed, functools._CacheInfo)  # noqa: SLF001
            return type(obj), arguments, dict(vars(obj))
    return None


def is_held(value: Any) -> bool | None:
    """Whether a lock of threading or of the package filelock is held; None if the value is no lock."""
    if _is_subclass(type(value), "filelock", "BaseFileLock"):
        return bool(value.is_locked)
    if type(value) not in _LOCKS:
        return None
    # This thread could acquire a reentrant lock that it holds already.
    held_by_this_thread = hasattr(value, "_is_owned") and value._is_owned()  # noqa: SLF001
    if held_by_this_thread or not value.acquire(blocking=False):
        return True
    value.release()
    return False


def _is_subclass(kind: type, package: str, name: str) -> bool:
    """Whether a class is, or inherits from, a class of a package; the package is not imported for that."""
    return any((base.__module__.split(".")[0], base.__name__) == (package, name) for base in kind.__mro__)


def _reason_against(value: Any) -> str | None:
    """Return why a value must not travel, even if pickle accepts it; None if no reason is known."""
    if is_held(value):
        return "is a lock that is held"
    if isinstance(value, io.IOBase) and not isinstance(value, (io.BytesIO, io.StringIO)):
        return "is an open file"
    kind = type(value)
    if kind.__module__.split(".")[0] == "accelerate" and kind.__name__ in _PROCESS_STATES:
        return f"is of Accelerate's {kind.__name__}, which is each process's own"
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "Tensor"):  # not imported, so the value is no tensor
        return None
    tensors = [value] if isinstance(value, torch.Tensor) else []
    if isinstance(value, torch.nn.Module):
        tensors = [*value.parameters(), *value.buffers()]
    for tensor in tensors:
        if tensor.device.type != "cpu":
            return f"is on the device {tensor.device}: leave it on the CPU, each rank has its own"
    return None


def _reason_within(value: Any) -> str | None:
    """Return why a value must not be a part of an object that travels; None if no reason is known."""
    # These may be in one: cloudpickle copies the text of an open file; the state that TrainingArguments have
    # is replaced by `_own_of_each_process`.
    if isinstance(value, io.IOBase) or _is_partial_state(value):
        return None
    return _reason_against(value)


def _is_partial_state(value: Any) -> bool:
    return _is_subclass(type(value), "accelerate", "PartialState")


def _innermost_unpicklable(name: str, value: Any, depth: int = _MAX_DEPTH) -> tuple[str, str] | None:
    """Return the name of the innermost part that cannot be pickled, and why; None: the whole value can.

    Searches ``depth`` levels of items and attributes. Functions and classes are not searched.
    """
    if isinstance(value, (FunctionType, type)):
        return None  # what functions and classes use is checked by its own name
    try:
        dumps(value)
    except BadInputError:  # it says already what cannot travel
        raise
    except Exception as error:  # noqa: BLE001 - objects may raise anything
        if reason := _reason_against(value):
            return name, reason
        parts = _parts(value, attributes=True) if depth > 0 else ()
        for path, part in parts:
            inner = _innermost_unpicklable(name + path, part, depth - 1)
            if inner is not None:
                return inner
        return name, f"cannot be pickled: {error}"
    return None


def _with_contents(name: str, value: Any, depth: int = _MAX_DEPTH) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of a variable, and of a container also its items, to ``depth`` levels."""
    yield name, value
    if depth > 0:
        for path, part in _parts(value):
            yield from _with_contents(name + path, part, depth - 1)


def _parts(value: Any, *, attributes: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the items of a container, and its attributes if asked for: ``[key]`` or ``.name``, and the value.

    Of a container, at most 1,000 items.
    """
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in [*value.items()][:_MAX_ITEMS])
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{place}]", part) for place, part in enumerate(value[:_MAX_ITEMS]))
    if attributes and hasattr(value, "__dict__") and not isinstance(value, ModuleType):
        yield from ((f".{name}", part) for name, part in vars(value).items())


def model_advice(call: Call) -> str | None:
    """Return advice if a call's function, for XLA's devices, builds its model inside; None: it does not."""
    models = {
        item.__name__
        for _, item in call.variables
        if isinstance(item, type) and _is_subclass(item, "torch", "Module")
    }
    try:
        return advice_on_source(inspect.getsource(call.function), models)
    except (OSError, TypeError):  # a partial, or a function without source
        return None


def paths_of_here(call: Call, base: Path, data: str | None) -> Mapping[str, str]:
    """Find texts in what a call takes along that are paths of this machine, which other nodes may lack.

    Returns text -> the variable or function that contains it, such as ``in config``. A relative path below
    the data is left out, because it leads to the staged data on a node.
    """
    containers: dict[str, str] = {}
    for container, text in _texts_of(call):
        if text not in containers and _is_path_of_this_machine(text, base, data):
            containers[text] = container
    return containers


def _texts_of(call: Call) -> Iterator[tuple[str, str]]:
    """Yield each text that a call takes along, after the variable that has it, such as ``in config``."""
    # The function is no variable, and needs no name here: it has texts only in its code.
    for name, value in [("", call.function), *call.variables]:
        constants: list[tuple[str, Any]] = []  # of a function: a path may be written in its code
        if isinstance(value, FunctionType) and _travels_by_value(value):
            for code in code_objects(value.__code__):
                constants += [(value.__name__, constant) for constant in code.co_consts]
        for container, content in [*constants, (name, value)]:
            for _, part in _with_contents("", content):
                if isinstance(part, (str, Path)):
                    yield f"in {container}", str(part)


def _is_path_of_this_machine(text: str, base: Path, data: str | None) -> bool:
    """Whether a text is an existing path that other nodes may lack: not of staged data, nor of the system."""
    # Not "." and "/", which every node has, nor what can be no path.
    if not text.strip(". /") or len(text) > _MAX_CHARACTERS or "\n" in text:
        return False
    path = Path(base, text)
    try:
        if not path.exists():
            return False
    except (OSError, ValueError):
        return False
    path = path.resolve()
    is_relative = not Path(text).is_absolute()
    if data is not None and is_relative and path.is_relative_to(Path(data).resolve()):
        return False  # it also leads to the staged data
    return len(path.parts) >= _MIN_PARTS and not str(path).startswith(_SYSTEM_FOLDERS)


_MODEL_NAME: Final = re.compile(r"[A-Z]\w*(?:Model|For[A-Z]\w*)(?:Head)?|Sequential")
_NO_MODEL_NAME: Final = re.compile(r"DataCollator|Tokenizer|Processor|Config|Arguments|Output")
_METHODS_THAT_MAKE: Final = ("from_pretrained", "from_config")


def advice_on_source(source: str, modules: Collection[str] = ()) -> str | None:
    """Explain what it costs that a function builds its model inside; None: it seems to build none.

    It judges by names alone and may be wrong, so the text is for a warning, and no reason to refuse.

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
    models = {*modules}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(_last_name(base) == "Module" for base in node.bases):
            models.add(node.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _makes_model(node.func, models):
            return (
                f"the function builds its model inside ({ast.unparse(node.func)}): every process that runs "
                "it holds one of its own in the host's memory, beside the devices' copy, and builds it again "
                "with each call. Build it once, outside, and pass it in: "
                "notebook_launcher(function, (model,))"
            )
    return None


def _makes_model(callee: ast.expr, models: Collection[str]) -> bool:
    """Whether a call of ``callee`` seems to make a model: it is in ``models``, or its name suggests it."""
    name = _last_name(callee)
    if name in models or name == "create_model":
        return True
    # Tokenizers and configurations have these methods too: judge by the class.
    if name in _METHODS_THAT_MAKE and isinstance(callee, ast.Attribute):
        name = _last_name(callee.value)
    return bool(_MODEL_NAME.fullmatch(name)) and not _NO_MODEL_NAME.search(name)


def _last_name(node: ast.expr) -> str:
    """Return the last name of a dotted expression: ``fit`` of ``trainer.fit``; empty: it has none."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
