"""Tell what a function returned: in numbered parts, for a line holds no more."""

from typing import Final

from manycpu.pipeline.node.emit import say

__all__ = ["tell", "tell_failure"]

_PART: Final = 2900  # characters of a part, in lines of at most 4,096 bytes


def tell(text: str) -> None:
    """Write a text as events ``returned``.

    Args:
        text: Base64: letters that JSON leaves as they are.
    """
    parts = [text[start : start + _PART] for start in range(0, len(text), _PART)] or [""]
    for number, part in enumerate(parts):
        say("returned", part=number, parts=len(parts), text=part)


def tell_failure(why: str) -> None:
    """Write that a function returned what cannot travel, and why."""
    say("returned", part=0, parts=0, text="", message=why)
