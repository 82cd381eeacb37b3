"""Print messages into the log of a training."""

import os
import sys

__all__ = ["say"]


def say(message: str) -> None:
    """Write a line to stderr on rank 0, or where there are no ranks."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"manycpu: {message}\n")
        sys.stderr.flush()
