"""Write events for the log forwarder, each line in one write; where there is none, on stdout."""

import fcntl
import json
import os
import resource
import select
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

from manycpu.pipeline.spec import events

__all__ = ["keep", "say", "say_in_parts", "warn"]

_MESSAGE_LIMIT = 3000
_PART: Final = 3500  # bytes of a text as JSON: the line needs some for the rest
_KEPT: Final[list[int]] = []
_SIGNATURE: Final[list[str]] = []
_IDENTITY: Final[list[tuple[int, int]]] = []
_ABOVE: Final = 4096  # where no script expects a file of its own


def keep(file: int, signature: str) -> None:
    """Write to this file from now on, whatever the script makes of its stdout; not its child programs.

    Args:
        file: Leads to the log forwarder.
        signature: What tells the forwarder that a line is no print of the script's.
    """
    _SIGNATURE[:] = [signature]
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    own = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, min(_ABOVE, limit // 2))
    _IDENTITY[:] = [_identity(own)]
    # The script may close our own, or open another file by its number: its stdout or stderr may still do.
    _KEPT[:] = [own, 1, 2]


def say(event: str, *, message: str | None = None, **fields: Any) -> None:
    """Write an event at once; a long message is cut, the fields are not.

    Raises:
        ValueError: The fields are longer than a line may be.
    """
    if message is not None:
        # As JSON a character takes up to six bytes; the rest of the line needs some too.
        while len(json.dumps(message)) > _MESSAGE_LIMIT:
            message = message[: len(message) * 3 // 4] + "…"
        fields["message"] = message
    _write(events.encode(event, time=round(time.time(), 3), **fields) + "\n")


def say_in_parts(event: str, text: str) -> None:
    """Write an event with a long text, in as many lines as it takes: ``part`` 1, 2, ... of ``parts``."""
    parts = [*_parts(text)]
    for number, part in enumerate(parts, 1):
        say(event, part=number, parts=len(parts), text=part)


def _parts(text: str) -> Iterator[str]:
    """Cut a text to what fits into a line, where a character may take twelve bytes."""
    while text:
        end = _PART
        while len(json.dumps(text[:end])) > _PART:
            end = end * 3 // 4
        yield text[:end]
        text = text[end:]


def _write(line: str) -> None:
    if not _KEPT:
        sys.stdout.write(line)
        sys.stdout.flush()
        return
    with suppress(OSError, ValueError, AttributeError):  # closed, or none at all
        sys.stdout.flush()  # what was printed before comes before
    signed = line.replace(events.PREFIX, _SIGNATURE[0], 1)
    for file in _KEPT:
        if _is_ours(file):
            _write_whole(file, signed.encode())
            return


def _is_ours(file: int) -> bool:
    try:
        return _identity(file) in _IDENTITY
    except OSError:  # closed
        return False


def _identity(file: int) -> tuple[int, int]:
    status = os.fstat(file)
    return status.st_dev, status.st_ino


def _write_whole(file: int, line: bytes) -> None:
    while line:
        try:
            line = line[os.write(file, line) :]
        except BlockingIOError:  # the script made its stdout non-blocking, and ours is the same pipe
            room = select.poll()
            room.register(file, select.POLLOUT)
            room.poll()


def warn(message: str) -> None:
    """Write a warning: something is not as the user may expect."""
    say("warning", message=message)
