"""Pickle what travels: functions and classes of the notebook by value, the environment by name."""

import io
import os
import pickletools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from manycpu.pipeline.spec.extras import require

__all__ = ["dumps", "is_held", "named_only"]

_TEXTS: Final = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
_GETS: Final = {"BINGET", "LONG_BINGET", "GET"}
_DOWNLOADED: Final = {"datasets_modules", "evaluate_modules", "transformers_modules"}
"""Code that Hugging Face's libraries import from a folder of their caches, which ranks do not look in."""
_MADE_ANEW: Final = {type(threading.Lock()): threading.Lock, type(threading.RLock()): threading.RLock}


def is_held(value: Any) -> bool | None:
    """Whether a lock is held, of threads or of the package filelock; None for what is no lock.

    One that is free is made anew where it arrives, so that each rank has its own, as after a fork.
    """
    if _is_file_lock(type(value)):
        return bool(value.is_locked)
    if type(value) not in _MADE_ANEW:
        return None
    if getattr(value, "_is_owned", lambda: False)() or not value.acquire(blocking=False):
        return True
    value.release()
    return False


def _is_file_lock(kind: type) -> bool:
    return any(
        (base.__module__.split(".")[0], base.__name__) == ("filelock", "BaseFileLock")
        for base in kind.__mro__
    )


def dumps(value: Any) -> bytes:
    """Pickle a value by cloudpickle; of ``os.environ`` the name: each process has its own, with secrets."""
    require("train", "function", "a function that travels")
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if obj is os.environ:
                return getattr, (os, "environ")
            if is_held(obj) is False:
                made = _MADE_ANEW.get(type(obj))
                return (type(obj), (obj.lock_file, obj.timeout)) if made is None else (made, ())
            return super().reducer_override(obj)

    stream = io.BytesIO()
    with _by_value(cloudpickle):
        Pickler(stream).dump(value)
    return stream.getvalue()


@contextmanager
def _by_value(cloudpickle: Any) -> Iterator[None]:
    """Have functions and classes of downloaded code travel by value."""
    modules = [module for name, module in [*sys.modules.items()] if name.split(".")[0] in _DOWNLOADED]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


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
