"""Write a rank's lines in a way that a forwarder cannot tear them."""

import array
import fcntl
import os
import select
import stat
import termios
import time
from typing import Final

from manycpu.pipeline.spec import events
from manycpu.pipeline.spec.events import LINE_LIMIT

__all__ = ["OrphanedError", "PipeWriter"]

_PATIENCE: Final = 1.0  # seconds to wait for a reader; then the line is written all the same
_NAP: Final = 0.0002


class OrphanedError(Exception):
    """The launcher is gone: nobody reads what the rank says."""


class PipeWriter:
    """Writes lines, never more than a forwarder takes in one read.

    mpirun reads blocks and passes them on as they are: two lines that fill its block are torn, and another
    rank's land in between. While a line more would make the pipe hold over 4,096 bytes, this waits.
    """

    def __init__(self) -> None:
        # Open MPI gives a terminal for stdout, which cannot be asked what it holds, and a pipe for stderr.
        terminal = "OMPI_COMM_WORLD_RANK" in os.environ and os.isatty(1)
        self._file = 2 if terminal and _is_pipe(2) else 1
        self._counts = _is_pipe(self._file)
        self._dropped = 0

    def write(self, line: bytes) -> None:
        """Write a line. One that a full disk does not take is dropped; the next tells how many were.

        Raises:
            OrphanedError: Nobody reads any more.
        """
        told = f"\n{events.missing_lines(self._dropped)}\n".encode() if self._dropped else b""
        self._dropped = 0 if self._put(told + line) else self._dropped + 1

    def _put(self, text: bytes) -> bool:
        self._wait_until_held(LINE_LIMIT - len(text))
        while text:
            try:
                text = text[os.write(self._file, text) :]
            except BrokenPipeError as error:
                raise OrphanedError from error
            except BlockingIOError:  # a process that shares it made it so
                select.select([], [self._file], [])
            except OSError:
                return False
        return True

    def drain(self) -> None:
        """Wait until what was written is read: whoever is killed next takes nothing along."""
        self._wait_until_held(0)

    def _wait_until_held(self, limit: int) -> None:
        if not self._counts:
            return
        deadline = time.monotonic() + _PATIENCE
        while self._held() > max(limit, 0) and time.monotonic() < deadline:
            time.sleep(_NAP)

    def _held(self) -> int:
        count = array.array("i", [0])
        fcntl.ioctl(self._file, termios.FIONREAD, count)
        return count[0]


def _is_pipe(file: int) -> bool:
    return stat.S_ISFIFO(os.fstat(file).st_mode)
