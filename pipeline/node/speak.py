"""Say an event on stdout: one write for each line."""

import sys
from typing import Any

from manycpu.pipeline.spec import events

__all__ = ["say", "warn"]


def say(event: str, **fields: Any) -> None:
    """Write an event at once.

    Raises:
        ValueError: The event would be longer than a line may be.
    """
    sys.stdout.write(events.encode(event, **fields) + "\n")
    sys.stdout.flush()


def warn(message: str) -> None:
    """Say what is not as the user may expect; long texts are cut."""
    say("warning", message=message[:1000])
