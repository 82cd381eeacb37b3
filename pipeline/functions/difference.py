"""Compare the present values of a file's names, part by part, with those that its source defines again."""

from __future__ import annotations

import inspect
import re
from functools import partial
from operator import itemgetter
from types import CodeType, FunctionType, MappingProxyType, MemberDescriptorType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_MAX_PAIRS: Final = 10_000  # to compare; larger values are data rather than definitions
_MAX_SHOWN_CHARACTERS: Final = 60  # of a value in a message
_CODE_FIELDS: Final = (
    *("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_exceptiontable"),
    *("co_argcount", "co_posonlyargcount", "co_kwonlyargcount"),
)
_METHOD_TYPES: Final = (FunctionType, classmethod, staticmethod, property)
_MISSING: Final = object()


class Comparison:
    """Compares the present value of a name in a file with the value that the file's source defines.

    Args:
        names: The names that occur in the source. Private attributes with other names belong to libraries,
            and are not compared.
    """

    def __init__(self, names: Collection[str | None]) -> None:
        self._names = frozenset(names)
        self._seen: dict[tuple[int, int], Any] = {}

    def difference(self, path: str, now: Any, written: Any) -> str | None:
        """Describe the first part of a value that differs; None: no difference in the first 10,000 parts.

        Args:
            path: How the source refers to the value, such as ``Model.rate``: the description begins with it.
            now: The present value.
            written: The value that the source defines when it is executed again.
        """
        pair = id(now), id(written)
        # A pair in `_seen` is compared already: values may contain themselves.
        if now is written or pair in self._seen or len(self._seen) > _MAX_PAIRS:
            return None
        self._seen[pair] = now, written  # kept alive, so that no other object takes their ids
        parts_now, parts_written = dict(self._parts(now)), dict(self._parts(written))
        same = self._is_same(now, written, have_parts=bool(parts_now and parts_written))
        if same is not None:
            return None if same else _describe(path, now, written)
        for name in {**parts_now, **parts_written}:
            if (name in parts_now) != (name in parts_written):  # only one of the values has this part
                value_now, value_written = parts_now.get(name, _MISSING), parts_written.get(name, _MISSING)
                return _describe(path + name, value_now, value_written)
        if [*parts_now] != [*parts_written]:
            return f"{path} has another order"
        for name, part in parts_now.items():
            described = self.difference(path + name, part, parts_written[name])
            if described is not None:
                return described
        return None

    def _is_same(self, now: Any, written: Any, *, have_parts: bool) -> bool | None:
        """Whether two values are the same as a whole; None if only their parts can answer that.

        ``have_parts``: whether both of them have parts.
        """
        # The source defines its classes again: two classes of equal parts count as one type.
        if type(now) is not type(written) and self.difference("", type(now), type(written)) is not None:
            return False
        if isinstance(now, (dict, list, tuple)):  # == on the whole would take 1, 1.0 and True in it as equal
            return None
        if _is_equal(now, written):
            return True
        if have_parts:
            return None
        # Without __eq__, as for locks, only identities were compared: two objects are no proof of a change.
        equality: Any = type(now).__eq__
        return equality is object.__eq__

    def _parts(self, item: Any) -> Iterator[tuple[str, Any]]:
        """Yield the name of each part of an item, such as ``.rate``, ``[0]`` or nothing, and its value."""
        match item:
            case CodeType():
                yield from _parts_of_code(item)
            case FunctionType():
                yield from _parts_of_function(item)
            case type():
                yield from ((f" (base {place})", base) for place, base in enumerate(item.__bases__))
                # Sorted: decorators add attributes in an order of their own. The descriptor of a slot has no
                # value: `_attributes` reads the slots of each object.
                for name, value in sorted(vars(item).items(), key=itemgetter(0)):
                    if self._is_compared(name, value) and not isinstance(value, MemberDescriptorType):
                        yield f".{name}", value
            case property():
                yield "", (item.fget, item.fset, item.fdel)
            case classmethod() | staticmethod():
                yield "", item.__func__
            case partial():
                yield "", (item.func, item.args, item.keywords)
            case dict() | MappingProxyType() | list() | tuple() | set() | frozenset():
                yield from _parts_of_container(item)
            case _:
                attributes = _attributes(item)
                yield from (
                    (f".{name}", value) for name, value in attributes if self._is_compared(name, value)
                )

    def _is_compared(self, name: str, value: Any) -> bool:
        """Whether to compare an attribute: public, a special method, or private and named in the source."""
        if name.startswith("__") and name.endswith("__"):
            # `__annotate_func__` (Python 3.14) evaluates annotations, and has the whole class in its closure.
            return isinstance(value, _METHOD_TYPES) and name != "__annotate_func__"
        if name == "_value_":  # of a member of an Enum
            return True
        if not name.startswith("_"):
            return True
        # In a class, `__rate` is stored as `_Model__rate`.
        return name in self._names or re.sub("^_.*?__", "__", name) in self._names


def _parts_of_container(container: Any) -> Iterator[tuple[str, Any]]:
    """Yield ``[key]`` and the value of each item; of a set, the item's name and None, in a fixed order."""
    match container:
        case dict() | MappingProxyType():
            for key, value in container.items():
                # The repr of a function has its address, which is another one each time.
                key_name = _name(key) if callable(key) else repr(key)
                yield f"[{key_name}]", value
        case list() | tuple():
            yield from ((f"[{place}]", value) for place, value in enumerate(container))
        case _:
            yield from ((f"[{name}]", None) for name in sorted(map(_name, container)))


def _parts_of_code(code: CodeType) -> Iterator[tuple[str, Any]]:
    """Yield the parts of code that depend neither on its place in a file nor on the function around it."""
    # CO_NESTED says only that a function is around it.
    yield "", (code.co_flags & ~inspect.CO_NESTED, *(getattr(code, name) for name in _CODE_FIELDS))
    for place, constant in enumerate(code.co_consts):
        # The qualified name of a class within a function begins with that function.
        if isinstance(constant, str):
            constant = constant.rpartition("<locals>.")[2]  # noqa: PLW2901 - the part that is compared
        yield f" (constant {place})", constant


def _parts_of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a function by name: its code, defaults, closure's values and attributes."""
    yield "()", function.__code__
    yield " (its defaults)", (function.__defaults__ or (), function.__kwdefaults__ or {})
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            content = cell.cell_contents
        except ValueError:  # not assigned yet
            content = _MISSING
        yield f" ({name})", content
    yield from ((f".{name}", value) for name, value in vars(function).items())


def _attributes(item: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each attribute of an object, from ``__dict__`` and ``__slots__``."""
    yield from getattr(item, "__dict__", {}).items()
    for base_class in type(item).__mro__:
        for name, slot in vars(base_class).items():
            if isinstance(slot, MemberDescriptorType):
                yield name, getattr(item, name, _MISSING)


def _is_equal(now: Any, written: Any) -> bool:
    """Whether two objects compare as equal; arrays if all of their items do."""
    if isinstance(now, float) and now != now:  # noqa: PLR0124 - true of NaN only
        return repr(now) == repr(written)
    try:
        same = now == written
        return bool(same.all() if hasattr(same, "all") else same)
    except Exception:  # noqa: BLE001 - __eq__ may raise anything
        return False


def _describe(path: str, now: Any, written: Any) -> str:
    return f"{path} is {_shown(now)}, and is written as {_shown(written)}"


def _shown(value: Any) -> str:
    """Write a value for a message; of a long one only the type."""
    if value is _MISSING:
        return "missing"
    if isinstance(value, (FunctionType, type)):
        return f"another {_name(value)}"
    text = repr(value)
    if len(text) > _MAX_SHOWN_CHARACTERS or "\n" in text:
        return f"another {type(value).__name__}"
    return text


def _name(item: Any) -> str:
    return str(getattr(item, "__qualname__", None) or repr(item))
