"""What a script leaves running when it has ended: its names, and its end."""

import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

__all__ = ["end", "names"]


class _Process(NamedTuple):
    pid: int
    parent: int
    name: str


def names(but: int) -> list[str]:
    """Name the processes below this one that still run, without the process ``but``."""
    children: defaultdict[int, list[_Process]] = defaultdict(list)
    for process in _running():
        children[process.parent].append(process)
    parents, found = [os.getpid()], list[str]()
    while parents:
        below = [process for process in children[parents.pop()] if process.pid != but]
        parents.extend(process.pid for process in below)
        found.extend(process.name for process in below)
    return sorted(found)


def end(group: int) -> None:
    """Kill the process group ``group`` and all children of this process, also those that become its own."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    me = os.getpid()
    with suppress(ChildProcessError):
        while True:
            for process in _running():
                if process.parent == me:
                    with suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)
            os.waitpid(-1, 0)


def _running() -> Iterator[_Process]:
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The name in parentheses may hold anything; state and parent follow the last one.
            start, _, rest = file.read_bytes().rpartition(b")")
            state, parent = rest.split()[:2]
            if state != b"Z":  # it has ended, and waits to be reaped
                name = start.partition(b"(")[2].decode(errors="replace")
                yield _Process(int(file.parent.name), int(parent), name)
