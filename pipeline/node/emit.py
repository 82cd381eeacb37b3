"""Write events for the log forwarder, each line in one write; where there is none, on stdout."""

import fcntl
import json
import os
import sys
import time
from contextlib import suppress
from typing import Any, Final

from manycpu.pipeline.spec import events

__all__ = ["keep", "say", "warn"]

_MESSAGE_LIMIT = 3000
_KEPT: Final[list[int]] = []
_ABOVE: Final = 100  # where no script expects a file of its own


def keep(file: int) -> None:
    """Write to this file from now on, whatever the script makes of its stdout; not its child programs."""
    _KEPT[:] = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _ABOVE)]


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


def _write(line: str) -> None:
    if not _KEPT:
        sys.stdout.write(line)
        sys.stdout.flush()
        return
    with suppress(OSError, ValueError, AttributeError):  # closed, or none at all
        sys.stdout.flush()  # what was printed before comes before
    os.write(_KEPT[0], line.encode())


def warn(message: str) -> None:
    """Write a warning: something is not as the user may expect."""
    say("warning", message=message)
