"""Report what the start waits for, and for how long: once for the run, before the program's first line."""

import time

from manycpu.pipeline.node.emit import say

__all__ = ["Start"]


class Start:
    """Says each thing as the waiting for it begins, and its seconds with what comes next; on rank 0."""

    def __init__(self, *, speaks: bool) -> None:
        self._speaks = speaks
        self._took = ""
        self._since = time.monotonic()

    def waits_for(self, what: str) -> None:
        """Report what comes next; it takes until the next call."""
        self._say(f"waits for {what}")
        self._took, self._since = what, time.monotonic()

    def ends(self) -> None:
        """Report that the program begins."""
        self._say("the program begins")

    def _say(self, next_: str) -> None:
        took = f"{self._took} took {time.monotonic() - self._since:.1f} s; " if self._took else ""
        if self._speaks:
            say("start", message=f"{took}{next_}")
