"""Programs that tests start: they handle signals as users' programs do, and end with their test."""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, AnyStr
from weakref import WeakSet

import psutil

_END = 300  # seconds until a killed process has ended


class Program(subprocess.Popen[AnyStr]):
    """A process that is killed with its children at the end of its with block or its test.

    At the end of its with block, subprocess.Popen waits for the process: a failing test would never end.
    """

    if not TYPE_CHECKING:  # type checkers use the overloads of Popen, which decide between bytes and text

        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)
            _RUNNING.add(self)

    def __exit__(self, *_: object) -> None:
        self.end()
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                with suppress(BrokenPipeError):  # data that was on its way to an ended program is lost
                    stream.close()

    def end(self) -> None:
        """Kill the process and its children, and wait for its end."""
        if self.poll() is None:
            children = list[psutil.Process]()
            with suppress(psutil.NoSuchProcess):  # another thread has just waited for its end
                children = psutil.Process(self.pid).children(recursive=True)
            self.kill()
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            self.wait(_END)


@contextmanager
def end_programs() -> Iterator[None]:
    """Kill the programs that were started in this block and still run."""
    before = set(_RUNNING)
    yield
    for program in set(_RUNNING) - before:
        program.end()


def take_signals() -> None:
    """Let this process and its children react to Ctrl-C: a shell starts background jobs that ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)


_RUNNING: "WeakSet[Program[str] | Program[bytes]]" = WeakSet()
