"""Copy what a training prints to its log: a full disk neither ends it nor has it wait."""

import os
import select
import threading
import time
from typing import Final

from manycpu.pipeline.spec import events
from manycpu.pipeline.spec.event_types import decode

__all__ = ["LogCopy"]

_BLOCK: Final = 1 << 16
_PENDING_LIMIT: Final = 1 << 20  # bytes without a newline that are kept together
_NEEDED: Final = events.RESERVED - {"start", "pace"}  # on the others no run's end depends
_OWED: Final = 4096  # lines that are kept at most while the disk is full
_TRY_EVERY_S: Final = 0.2
_ROOM_PATIENCE_S: Final = 600.0  # to wait at the end until the disk takes what is owed


class LogCopy:
    """Copies lines from a pipe to a file, in a thread of its own.

    A line that the file does not take, as on a full disk, is dropped; the next one that it takes follows a
    warning with their count. Events on which the end of the run depends are kept, and written first.

    Args:
        source: The reading end of the pipe.
        log: The file, open for appending.
    """

    def __init__(self, source: int, log: int) -> None:
        self._source, self._log = source, log
        self._pending, self._torn = b"", False
        self._owed: list[bytes] = []
        self._dropped = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self.received = 0
        """Bytes that came so far, written or not."""
        self.spoken = False
        """Whether a rank has written a line."""
        os.set_blocking(source, False)
        self._thread.start()

    def end(self) -> None:
        """Copy what is there, and wait a while for room for what is needed of it."""
        self._ending.set()
        self._thread.join()
        os.close(self._source)

    def _copy(self) -> None:
        while self._read(_TRY_EVERY_S) or not self._ending.is_set():
            self._catch_up()
        self._write([self._pending] if self._pending else [])
        until = time.monotonic() + _ROOM_PATIENCE_S
        while not self._catch_up() and time.monotonic() < until:
            time.sleep(_TRY_EVERY_S)

    def _read(self, seconds: float) -> bool:
        """Copy a block, once there is one; False where none comes in so many seconds."""
        if not select.select([self._source], [], [], seconds)[0]:
            return False
        block = os.read(self._source, _BLOCK)
        if not block:  # its writers are gone: there is nothing to be waited for but the end
            self._ending.wait()
            return False
        self.received += len(block)
        *whole, self._pending = (self._pending + block).split(b"\n")
        if len(self._pending) > _PENDING_LIMIT:
            whole, self._pending = [*whole, self._pending], b""
        self.spoken = self.spoken or any(_is_of_rank(line) for line in whole)
        self._write(whole)
        return True

    def _write(self, lines: list[bytes]) -> None:
        """Write lines at once; those for which there is no room are dropped, or owed."""
        rest = lines[self._put(lines) if self._catch_up() else 0 :]
        for line in rest:
            if len(self._owed) < _OWED and _is_needed(line):
                self._owed.append(line)
            else:
                self._dropped += 1

    def _catch_up(self) -> bool:
        """Write what is owed, and how many lines were dropped; whether there was room for all."""
        del self._owed[: self._put(self._owed)]
        if self._owed:
            return False
        if self._dropped and self._put([events.missing_lines(self._dropped).encode()]):
            self._dropped = 0
        return not self._dropped

    def _put(self, lines: list[bytes]) -> int:
        """Write lines for as long as there is room; how many were written whole."""
        text = b"".join(line + b"\n" for line in lines)
        start = b"\n" if self._torn else b""
        written = _write_to(self._log, start + text if text else b"") - len(start)
        if written < 0 or not text:
            return 0
        self._torn = written > 0 and text[written - 1 : written] != b"\n"
        return text[:written].count(b"\n")


def _write_to(file: int, text: bytes) -> int:
    """Write for as long as there is room; how many bytes were written."""
    written = 0
    while written < len(text):
        try:
            written += os.write(file, text[written:])
        except OSError:
            break
    return written


def _is_needed(line: bytes) -> bool:
    event = decode(events.split(line.decode(errors="replace")).text)
    return event is not None and event.event in _NEEDED


def _is_of_rank(line: bytes) -> bool:
    return events.split(line.decode(errors="replace")).rank is not None
