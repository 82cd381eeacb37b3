"""Waiting and process checks that tests of several folders share."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil


def until(condition: Callable[[], object], timeout: float = 300) -> None:
    """Wait until a condition is true; fail after `timeout` seconds, which are enough for a slow machine."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout:g} s in vain"
        time.sleep(0.02)


def processes_of(folder: Path) -> Iterator[psutil.Process]:
    """Yield the processes, except this one, whose command or environment contains the path of a folder."""
    for process in psutil.process_iter():
        try:
            if process.status() == psutil.STATUS_ZOMBIE or process.pid == psutil.Process().pid:
                continue
            known = [*process.cmdline(), *process.environ().values()]
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if any(str(folder) in text for text in known):
            yield process
