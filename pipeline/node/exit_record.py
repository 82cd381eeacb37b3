"""What the parent of a rank records of its end, where it stays when the log of the rank is lost."""

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any, Final

from manycpu.pipeline.spec import events, exit_records

__all__ = ["ExitRecord"]

_MARK: Final = events.PREFIX.encode()
_KEPT: Final = frozenset({"proof", "backend", "returned"})  # only the rank itself can report these


class ExitRecord:
    """Collects what is to be recorded, from the lines that the parent passes on."""

    def __init__(self) -> None:
        self._folder = os.environ.get("MANYCPU_EXITS")
        self._proof: dict[str, Any] = {}
        self._lines: dict[tuple[str, int], str] = {}

    def note(self, line: bytes) -> None:
        """Keep a line if the rank's end is judged by it; of the same event the last one."""
        if not self._folder or not line.startswith(_MARK):
            return
        kind, event = "", {}
        with contextlib.suppress(ValueError, RecursionError):  # a program may print what only looks like one
            event = json.loads(line[len(_MARK) :])
            kind = event["event"]
        if kind == "proof":
            self._proof = event
        if kind in _KEPT:
            self._lines[kind, event.get("part", 0)] = line.decode()

    def write(self, code: int, **fields: Any) -> None:
        """Write how the rank ended, unless it met nobody; a full or read-only volume ends no run.

        Args:
            code: Its exit code, negative for a signal.
            fields: The others of its ``exit`` event.
        """
        if not self._folder or not self._proof:
            return
        meeting, ended = self._proof["meeting"], round(time.time(), 3)
        end = events.encode("exit", code=code, time=ended, meeting=meeting, **fields)
        record = {name: self._proof[name] for name in ("meeting", "rank", "world_size", "host", "hostname")}
        record |= {"code": code, "time": ended, "lines": [*self._lines.values(), end]}
        with contextlib.suppress(OSError):
            exit_records.write(Path(self._folder), record)
