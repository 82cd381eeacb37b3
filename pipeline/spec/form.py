"""What the fields of runs and targets share: their section in a form, and how text becomes their value."""

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["null", "passable", "section", "words"]


def section(name: str) -> dict[str, Any]:
    """Put a field into a section of the trigger form."""
    return {"section": name}


def words(value: object) -> object:
    """Split text as a shell does."""
    return shlex.split(value) if isinstance(value, str) else value


def null(value: object) -> object:
    """Read the word null: the trigger form and the command line have nothing but text."""
    return None if value == "null" else value


def passable(value: Any) -> Any:
    """Return a value that processes can be given.

    Raises:
        ValueError: There is a NUL character in it.
    """
    if any("\0" in text for text in _texts(value)):
        raise ValueError("a NUL character can stand in no path, no argument and no environment")
    return value


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (Mapping, tuple)):
        for each in (*value, *value.values()) if isinstance(value, Mapping) else value:
            yield from _texts(each)
