"""Pickle what travels: functions and classes of the notebook by value, the environment by name."""

import io
import os
import pickletools
from collections.abc import Iterator
from typing import Any, Final

__all__ = ["dumps", "named_only"]

_TEXTS: Final = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
_GETS: Final = {"BINGET", "LONG_BINGET", "GET"}


def dumps(value: Any) -> bytes:
    """Pickle a value by cloudpickle; of ``os.environ`` the name: each process has its own, with secrets."""
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if obj is os.environ:
                return getattr, (os, "environ")
            return super().reducer_override(obj)

    stream = io.BytesIO()
    Pickler(stream).dump(value)
    return stream.getvalue()


def named_only(pickled: bytes) -> Iterator[str]:
    """List what a pickle has of ``__main__`` by its name alone: no other process finds it there.

    cloudpickle does so with what is neither a function nor a class, such as a function within a cache.
    """
    last: list[str | None] = [None, None]
    memo: list[str | None] = []
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name == "MEMOIZE":
            memo.append(last[1])
        elif opcode.name == "STACK_GLOBAL":
            if last[0] == "__main__" and last[1] is not None:
                yield last[1]
            last = [None, None]
        elif opcode.name in _TEXTS or opcode.name in _GETS:
            text = str(argument) if opcode.name in _TEXTS else memo[int(str(argument))]
            last = [last[1], text]
        elif opcode.name not in ("FRAME", "PROTO"):
            last = [None, None]
