"""Find and end the processes that a script leaves running, also where its log forwarder is killed."""

import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

__all__ = ["end", "names", "start_orphan_killer"]


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
    """Kill the process group ``group`` and all children of this process, also the orphans that it adopts."""
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


def start_orphan_killer(group: int) -> int:
    """Fork a process that kills the process group ``group`` once this process is gone; returns its id.

    When the log forwarder is killed, the kernel kills the rank with it (``die_with_parent``), but not the
    rank's own children.
    """
    watched, _held = os.pipe()  # the other end stays open for as long as this process lives, and in no other
    if killer := os.fork():
        os.close(watched)
        return killer
    try:
        # Out of reach of a launcher that kills its ranks by session or group, and holding none of its pipes.
        os.setsid()
        for name in [entry.name for entry in Path("/proc/self/fd").iterdir()]:
            if int(name) != watched:
                with suppress(OSError):
                    os.close(int(name))
        os.read(watched, 1)
        os.killpg(group, signal.SIGKILL)
    finally:
        os._exit(0)


def _running() -> Iterator[_Process]:
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The name in parentheses may contain anything; state and parent follow the last parenthesis.
            start, _, rest = file.read_bytes().rpartition(b")")
            state, parent = rest.split()[:2]
            if state != b"Z":  # a zombie has ended, and only waits to be reaped
                name = start.partition(b"(")[2].decode(errors="replace")
                yield _Process(int(file.parent.name), int(parent), name)
