"""Programs that tests start: they hear signals as users' programs do, and end with their test."""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, AnyStr
from weakref import WeakSet

import psutil

__all__ = ["Program", "end_programs", "take_signals"]

_END = 300  # seconds for what was killed to be gone


class Program(subprocess.Popen[AnyStr]):
    """A process that is killed, with all it started, where its block or its test ends before it does.

    subprocess.Popen waits there, for ever: a failing test would neither end nor be ended by its time limit.
    """

    if not TYPE_CHECKING:  # its overloads say which options give bytes and which text

        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)
            _RUNNING.add(self)

    def __exit__(self, *_: object) -> None:
        self.end()
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                with suppress(BrokenPipeError):  # what was on its way to a program that is gone
                    stream.close()

    def end(self) -> None:
        """Kill it and what it started, and see it go."""
        if self.poll() is None:
            children = psutil.Process(self.pid).children(recursive=True)
            self.kill()
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            self.wait(_END)


@contextmanager
def end_programs() -> Iterator[None]:
    """End what was started meanwhile and still runs."""
    before = set(_RUNNING)
    yield
    for program in set(_RUNNING) - before:
        program.end()


def take_signals() -> None:
    """Take Ctrl-C as in a terminal, also in a shell's background job, which is born deaf to it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)


_RUNNING: "WeakSet[Program[str] | Program[bytes]]" = WeakSet()
