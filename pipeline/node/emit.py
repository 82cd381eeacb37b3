"""Write events on stdout, each line in one write."""

import json
import sys
import time
from typing import Any

from manycpu.pipeline.spec import events

__all__ = ["say", "warn"]

_MESSAGE_LIMIT = 3000


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
    sys.stdout.write(events.encode(event, time=round(time.time(), 3), **fields) + "\n")
    sys.stdout.flush()


def warn(message: str) -> None:
    """Write a warning: something is not as the user may expect."""
    say("warning", message=message)
