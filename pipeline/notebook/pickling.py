"""Pickle the function that travels to the ranks, and unpickle what rank 0 returned."""

import hashlib
import io
import os
import pickletools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

from manycpu.pipeline.spec.errors import ManycpuError
from manycpu.pipeline.spec.event_types import ResultEvent
from manycpu.pipeline.spec.extras import require

__all__ = ["Returned", "dumps", "is_held", "named_only"]

_TEXTS: Final = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
_GETS: Final = {"BINGET", "LONG_BINGET", "GET"}
_DOWNLOADED: Final = {"datasets_modules", "evaluate_modules", "transformers_modules"}
"""Code that Hugging Face's libraries import from their caches, where ranks do not look for modules."""
_LOCKS: Final = {type(threading.Lock()): threading.Lock, type(threading.RLock()): threading.RLock}


def is_held(value: Any) -> bool | None:
    """Whether a lock of threading or of the package filelock is held; None if the value is no lock.

    A free lock is replaced by a new one when it is pickled, so that each rank has its own, as after a fork.
    """
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


def dumps(value: Any) -> bytes:
    """Pickle a value by cloudpickle: functions and classes of the notebook and of downloaded code by value.

    ``os.environ`` is pickled by name: each process has its own, with secrets.
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
            return super().reducer_override(obj)

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


def named_only(pickled: bytes) -> Iterator[str]:
    """List what a pickle has of ``__main__`` by name only: no other process finds it there.

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


class Returned:
    """What rank 0 of the current round returned: a value in an event, or in a file that the event names."""

    def __init__(self) -> None:
        self._result: ResultEvent | None = None
        self._content: bytes | None = None
        self._read_error: Exception | None = None

    def begin_round(self) -> None:
        """Forget what an earlier round returned: its ranks were restarted."""
        self._result = None

    def take(self, result: ResultEvent) -> None:
        """Take the event of rank 0."""
        self._result = result

    def read(self, read: Callable[[str], bytes]) -> None:
        """Read the file of the value by its name, if there is one; :meth:`value` raises what fails here."""
        if self._result is None or self._result.sha256 is None:
            return
        try:
            self._content = read(self._result.sha256)
        except Exception as error:  # noqa: BLE001 - the model must be exported all the same
            self._read_error = error

    def value(self) -> Any:
        """Return what rank 0 returned; unpickle a file only if its digest is the one of the event.

        Raises:
            ManycpuError: The value cannot travel, or did not arrive, as if the function ended the process.
        """
        import cloudpickle

        match self._result:
            case None:
                raise ManycpuError(
                    "the training succeeded, but nothing came back from the function",
                    fix="It ends rank 0 itself, as sys.exit does: have it return",
                )
            case ResultEvent(message=str(why_not)):
                raise ManycpuError(f"the training succeeded, but {why_not}")
            case ResultEvent(sha256=None):
                return self._result.value
        failure = "the training succeeded, but what the function returned"
        if self._content is None:
            raise ManycpuError(f"{failure} could not be read: {self._read_error}")
        if hashlib.sha256(self._content).hexdigest() != self._result.sha256:
            raise ManycpuError(f"{failure} was changed since")
        return cloudpickle.loads(self._content)
