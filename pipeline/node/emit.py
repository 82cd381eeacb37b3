"""Write events for the log forwarder, each line in one write; without a forwarder, on stdout."""

import fcntl
import json
import os
import resource
import select
import sys
import time
from contextlib import suppress
from typing import Any, Final

from manycpu.pipeline.spec import events

_MESSAGE_LIMIT = 3000  # characters of JSON; the other fields of the line need some room too
_PART_LIMIT: Final = 3500  # characters of JSON, of one part of a long text
_DESCRIPTORS: Final[list[int]] = []  # descriptors that may lead to the forwarder; empty: there is none
_SIGNATURE: Final[list[str]] = []  # begins each event for the forwarder, as the only element
_IDENTITY: Final[list[tuple[int, int]]] = []  # device and inode of the forwarder's pipe
_LEAST_DESCRIPTOR: Final = 4096  # scripts do not expect files of their own at numbers this high


class NodeExit(SystemExit):
    """Ends the rank with an exit code of manycpu, 86 to 89; ``except Exception`` does not catch it."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(code)
        self.message = message


def keep(file: int, signature: str) -> None:
    """From now on, write events to this pipe of the log forwarder, even if the script redirects its stdout.

    Programs that the script starts do not inherit the pipe. The signature begins each event, so that the
    forwarder can tell an event from what the script prints.
    """
    _SIGNATURE[:] = [signature]
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The least number for the copy must be below the limit of open files.
    copy = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, min(_LEAST_DESCRIPTOR, limit // 2))
    _IDENTITY[:] = [_identity(copy)]
    # The script may close this descriptor, or reuse its number: its stdout or stderr may still lead there.
    _DESCRIPTORS[:] = [copy, 1, 2]


def say(event: str, *, message: str | None = None, **fields: Any) -> None:
    """Write an event at once; a long message is cut, the fields are not.

    Without a log forwarder the event goes to stdout. The event is lost if the script has closed all
    descriptors that lead to the forwarder.

    Raises:
        ValueError: The fields are longer than a line may be.
    """
    if message is not None:
        # One character takes up to twelve bytes of JSON, so count the JSON.
        while len(json.dumps(message)) > _MESSAGE_LIMIT:
            message = message[: len(message) * 3 // 4] + "…"
        fields["message"] = message
    line = events.encode(event, time=round(time.time(), 3), **fields) + "\n"
    if not _DESCRIPTORS:
        sys.stdout.write(line)
        sys.stdout.flush()
        return
    with suppress(OSError, ValueError, AttributeError):  # stdout is closed, or there is none
        sys.stdout.flush()  # keeps the order of prints and events
    for file in _DESCRIPTORS:
        try:
            leads_to_forwarder = _identity(file) in _IDENTITY
        except OSError:  # closed
            continue
        if leads_to_forwarder:
            # Instead of the prefix, which a script may print too, the event begins with the signature.
            _write_whole(file, line.replace(events.PREFIX, _SIGNATURE[0], 1).encode())
            return


def say_in_parts(event: str, text: str) -> None:
    """Write an event with a long text, in as many lines as it takes: ``part`` 1, 2, ... of ``parts``."""
    parts = []
    while text:
        end = _PART_LIMIT
        while len(json.dumps(text[:end])) > _PART_LIMIT:  # one character may take twelve bytes of JSON
            end = end * 3 // 4
        parts.append(text[:end])
        text = text[end:]
    for number, part in enumerate(parts, 1):
        say(event, part=number, parts=len(parts), text=part)


def warn(message: str) -> None:
    """Write a warning: something is not as the user may expect."""
    say("warning", message=message)


def _identity(file: int) -> tuple[int, int]:
    """Return device and inode of an open file: equal for two descriptors of one pipe."""
    status = os.fstat(file)
    return status.st_dev, status.st_ino


def _write_whole(file: int, line: bytes) -> None:
    """Write a line to its end; wait while the pipe is full."""
    while line:
        try:
            line = line[os.write(file, line) :]
        except BlockingIOError:  # the script made its stdout non-blocking, and this is the same pipe
            room = select.poll()
            room.register(file, select.POLLOUT)
            room.poll()
