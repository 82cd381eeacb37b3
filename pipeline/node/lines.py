r"""Split a rank's output into lines, make forged events plain text, hide secrets, and write each line whole.

Some events decide how a run is judged. If a program prints a line that looks like such an event, the line is
changed, so that readers take it for ordinary output.

>>> lines = Lines(signature=b"::manycpu-5ec2e7:: ")
>>> lines.feed(b"one\n 10%\r 20%\rtwo")
[b'one']
>>> lines.feed(b'\n::manycpu-5ec2e7:: {"event": "exit"}\n::manycpu:: {"event": "exit"}\n')
[b'two', b'::manycpu:: {"event": "exit"}', b'::manycpu: : {"event": "exit"}']
"""

import array
import fcntl
import json
import os
import select
import stat
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from manycpu.pipeline.spec import events
from manycpu.pipeline.spec.credentials import HIDDEN, SHORTEST, secrets_in
from manycpu.pipeline.spec.events import LINE_LIMIT, PREFIX, RESERVED

_MARK: Final = PREFIX.encode()
_NO_MARK: Final = b"::manycpu: : "
_PENDING_LIMIT: Final = 1 << 20  # bytes; a longer line without an end is cut, so that memory stays bounded
_READER_TIMEOUT_S: Final = 1.0  # to wait for a reader; then the line is written even if it may be torn
_POLL_INTERVAL_S: Final = 0.0002


class Lines:
    """Collects bytes and returns lines without their newlines; of a progress bar only its last state.

    Args:
        signature: The text that begins each event of the rank itself, and nothing that its program prints.
    """

    def __init__(self, signature: bytes) -> None:
        self._signature, self._pending = signature, b""

    def feed(self, block: bytes) -> list[bytes]:
        """Add bytes; returns the lines that are complete now."""
        *whole, rest = (self._pending + block).split(b"\n")
        # Of a progress bar, keep the last state that ended with "\r" and what follows; drop earlier states.
        # That "\r" may be the first half of an "\r\n": then the state is the line.
        head, carriage_return, tail = rest.rpartition(b"\r")
        self._pending = head.rpartition(b"\r")[2] + carriage_return + tail
        if len(self._pending) > _PENDING_LIMIT:  # a line without an end is cut here
            whole, self._pending = [*whole, self._pending], b""
        return [part for line in whole for part in self._parts(line)]

    def bar(self) -> bytes:
        """Take the last state of a progress bar that has not ended its line; empty where there is none."""
        state, carriage_return, rest = self._pending.rpartition(b"\r")
        if not carriage_return:
            return b""
        self._pending = rest  # stays: its line is not complete yet
        # What follows the last "\r" is the newest state, which may be incomplete; else the state before it.
        return _without_mark(rest or state.rpartition(b"\r")[2])

    def rest(self) -> list[bytes]:
        """Take the last line, which has no newline: its process died in the middle of it."""
        last, self._pending = self._pending, b""
        return list(self._parts(last)) if last else []

    def _parts(self, line: bytes) -> Iterator[bytes]:
        """Split a line into what a program printed and an event of the rank itself, if one ends the line.

        Of a progress bar only the last state is left.
        """
        text = line.rstrip(b"\r").rpartition(b"\r")[2]
        before, signature, after = text.partition(self._signature)
        if before or not signature:  # an empty line is a line; an empty text before an event is none
            yield from _printed(before)
        if signature:  # the reader gets the common prefix instead
            yield _MARK + after


def _printed(text: bytes) -> Iterator[bytes]:
    """Yield what a program printed; if it may not report such an event, change the event's prefix."""
    before, mark, after = text.partition(_MARK)
    kind = None
    with suppress(ValueError, RecursionError):  # without a kind, it is made ordinary output below
        event = json.loads(after.decode(errors="replace"))
        kind = event.get("event") if isinstance(event, dict) else None
    # RESERVED: events that decide something, so that a program must not forge them.
    if not mark or not isinstance(kind, str) or kind in RESERVED:
        yield _without_mark(text)
        return
    if before:
        yield before
    yield mark + after


def _without_mark(text: bytes) -> bytes:
    """Change an event's prefix, so that no reader takes the text, or a piece of it, for an event."""
    return text.replace(_MARK, _NO_MARK)


class HiddenSecrets:
    """Hides the run's secrets in a rank's lines, because not all readers of a log may know the secrets.

    In an event it hides them in the message only. Readers need the other fields as they are.

    Args:
        environ: The rank's environment; of its variables only those that ``run.env`` has set are searched.
        argv: The command line with the program and its options.
    """

    def __init__(self, environ: Mapping[str, str], argv: Sequence[str]) -> None:
        names = environ.get("MANYCPU_USER_ENV", "").split(",")
        env = {name: environ[name] for name in names if name in environ}
        # Longest first: a secret may be a part of another one, which would no longer be found.
        candidates = sorted(secrets_in({"env": env, "args": [*argv]}), key=len, reverse=True)
        self._secrets = [secret for secret in candidates if len(secret) >= SHORTEST]
        # All forms in which a line may have a secret: plain, in JSON, as a literal of Python.
        forms = {form for text in self._secrets for form in (text, json.dumps(text)[1:-1], repr(text)[1:-1])}
        longest_first = sorted(forms, key=len, reverse=True)
        # os.environ keeps bytes that are no UTF-8 as surrogates: this restores them.
        self._forms = [form.encode(errors="surrogateescape") for form in longest_first]

    def hide(self, line: bytes) -> bytes:
        """Hide the secrets in a line, given without its newline."""
        if not any(form in line for form in self._forms):
            return line
        if line.startswith(_MARK):  # the line is an event
            try:
                event: Any = json.loads(line[len(_MARK) :])
                message = event["message"]
                for secret in self._secrets:
                    message = message.replace(secret, HIDDEN)
                return events.encode(**{**event, "message": message}).encode()
            except (KeyError, TypeError, AttributeError):  # it has no message
                return line
            except (ValueError, RecursionError):  # it cannot be read, or is too long when written again
                pass
        for form in self._forms:
            line = line.replace(form, HIDDEN.encode())
        return line


def pieces(prefix: bytes, line: bytes) -> Iterator[bytes]:
    """Cut a line into pieces of at most ``LINE_LIMIT`` bytes, each with the prefix and a newline."""
    room = LINE_LIMIT - len(prefix) - 1  # bytes
    # An event is never cut: half of it would be no event any more.
    if line.startswith(_MARK) or len(line) <= room:
        yield prefix + line + b"\n"
        return
    while line:
        end = room
        # A cut before a continuation byte of UTF-8 would split a character, which has at most three of them.
        while room - 4 < end < len(line) and line[end] & 0xC0 == 0x80:  # noqa: PLR2004
            end -= 1
        yield prefix + line[:end] + b"\n"
        line = line[end:]


class OrphanedError(Exception):
    """The launcher has ended, so that no process reads the rank's lines."""


class PipeWriter:
    """Writes lines to the launcher, and waits between them so that the launcher reads each line whole.

    mpirun reads blocks and passes them on as they are. A line that does not fit into a block is cut, and
    another rank's line may come between its parts. So a line is written only once it and all unread bytes in
    the pipe are at most 4,096 bytes together.
    """

    def __init__(self) -> None:
        # Open MPI gives a terminal for stdout, whose fill level cannot be asked for, and a pipe for stderr.
        terminal = "OMPI_COMM_WORLD_RANK" in os.environ and os.isatty(1)
        self._file = 2 if terminal and _is_pipe(2) else 1
        self._has_fill_level = _is_pipe(self._file)
        self._dropped = 0

    def write(self, line: bytes) -> None:
        """Write a line, or drop it if the disk is full; the next write reports how many lines were dropped.

        Raises:
            OrphanedError: No process reads any more.
        """
        # The first newline ends a line of which only a part was written.
        note = f"\n{events.missing_lines(self._dropped)}\n".encode() if self._dropped else b""
        text = note + line
        self.drain(LINE_LIMIT - len(text))  # until the line and what is unread fit into one block
        while text:
            try:
                text = text[os.write(self._file, text) :]
            except BrokenPipeError as error:
                raise OrphanedError from error
            except BlockingIOError:  # a process that shares the file made it non-blocking
                select.select([], [self._file], [])
            except OSError:
                self._dropped += 1
                return
        self._dropped = 0

    def drain(self, limit: int = 0) -> None:
        """Wait until at most ``limit`` bytes in the pipe are unread, but for a second at most.

        With 0, wait until the launcher has read all lines, so that none is lost if it is killed next.
        """
        if not self._has_fill_level:
            return
        deadline = time.monotonic() + _READER_TIMEOUT_S
        unread = array.array("i", [0])  # bytes, which the call below writes
        while time.monotonic() < deadline:
            fcntl.ioctl(self._file, termios.FIONREAD, unread)
            if unread[0] <= max(limit, 0):
                return
            time.sleep(_POLL_INTERVAL_S)


def _is_pipe(file: int) -> bool:
    return stat.S_ISFIFO(os.fstat(file).st_mode)
