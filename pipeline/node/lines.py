r"""Whole lines out of a stream of bytes, as a reader of a log wants them.

What a program prints is never an event that decides something, whatever it looks like.

>>> lines = Lines(signature=b"::manycpu-5ec2e7:: ")
>>> lines.feed(b"one\n 10%\r 20%\rtwo")
[b'one']
>>> lines.feed(b'\n::manycpu-5ec2e7:: {"event": "exit"}\n::manycpu:: {"event": "exit"}\n')
[b'two', b'::manycpu:: {"event": "exit"}', b'::manycpu: : {"event": "exit"}']
"""

import json
from collections.abc import Iterator

from manycpu.pipeline.spec.events import LINE_LIMIT, PREFIX, RESERVED

__all__ = ["Lines", "pieces"]

_MARK = PREFIX.encode()
_NO_MARK = b"::manycpu: : "
_PENDING_LIMIT = 1 << 20  # a line without an end is cut here, so that memory stays bounded


class Lines:
    """Collects bytes and gives back lines without their ends; of a progress bar only its last state.

    Args:
        signature: What events of the rank itself begin with.
    """

    def __init__(self, signature: bytes) -> None:
        self._signature, self._pending = signature, b""

    def feed(self, block: bytes) -> list[bytes]:
        """Add bytes; the lines that are whole now."""
        *whole, rest = (self._pending + block).split(b"\n")
        self._pending = _latest(rest)
        if len(self._pending) > _PENDING_LIMIT:
            whole, self._pending = [*whole, self._pending], b""
        return [part for line in whole for part in self._parts(line)]

    def bar(self) -> bytes:
        """Take the last state of a progress bar that has not ended its line; empty where there is none."""
        state, ended, rest = self._pending.rpartition(b"\r")
        if not ended:
            return b""
        self._pending = rest
        return _without_mark(rest or state.rpartition(b"\r")[2])

    def rest(self) -> list[bytes]:
        """Take what was never ended by a newline: a process that died in the middle of a line."""
        last, self._pending = self._pending, b""
        return list(self._parts(last)) if last else []

    def _parts(self, line: bytes) -> Iterator[bytes]:
        """Reduce a progress bar to its last state, and start a line of its own for an event behind it."""
        text = line.rstrip(b"\r").rpartition(b"\r")[2]
        before, signed, after = text.partition(self._signature)
        if before or not signed:
            yield from _printed(before)
        if signed:
            yield _MARK + after


def pieces(prefix: bytes, line: bytes) -> Iterator[bytes]:
    """Cut a line to what a pipe takes in one write, each piece with the prefix and a newline."""
    room = LINE_LIMIT - len(prefix) - 1
    # An event is never cut: half of it would be no event any more.
    if line.startswith(_MARK) or len(line) <= room:
        yield prefix + line + b"\n"
        return
    while line:
        end = _boundary(line, room)
        yield prefix + line[:end] + b"\n"
        line = line[end:]


def _boundary(line: bytes, limit: int) -> int:
    """Find where to cut so that no UTF-8 character is torn: before a byte that continues none."""
    if len(line) <= limit:
        return len(line)
    end = limit
    while end > limit - 4 and line[end] & 0xC0 == 0x80:  # noqa: PLR2004 - UTF-8's continuation bytes
        end -= 1
    return end


def _latest(rest: bytes) -> bytes:
    # Keeps the last finished state too: its carriage return may be the first half of "\r\n".
    head, ended, tail = rest.rpartition(b"\r")
    return head.rpartition(b"\r")[2] + ended + tail


def _printed(text: bytes) -> Iterator[bytes]:
    """Pass on what a program printed: an event only where programs may report it."""
    before, mark, after = text.partition(_MARK)
    if not mark or not _may_be_printed(after):
        yield _without_mark(text)
        return
    if before:
        yield before
    yield mark + after


def _may_be_printed(fields: bytes) -> bool:
    try:
        event = json.loads(fields.decode(errors="replace"))
    except (ValueError, RecursionError):  # another version of Python may read it
        return False
    kind = event.get("event") if isinstance(event, dict) else None
    return isinstance(kind, str) and kind not in RESERVED


def _without_mark(text: bytes) -> bytes:
    """Have a text look almost the same, and be an event to nobody: also not a piece of it."""
    return text.replace(_MARK, _NO_MARK)
