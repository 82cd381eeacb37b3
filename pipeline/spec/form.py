"""What the fields of runs and targets share: sections of the trigger form, conversions and patterns."""

import shlex
from collections.abc import Iterator, Mapping
from typing import Any, Final

__all__ = [
    "AMOUNT_PATTERN",
    "FOLDER_PATTERN",
    "LABEL_PATTERN",
    "NAME_PATTERN",
    "PATTERN_HINTS",
    "null",
    "passable",
    "section",
    "words",
]

AMOUNT_PATTERN: Final = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$"
"""An amount of memory or storage, as Kubernetes writes it."""
FOLDER_PATTERN: Final = r"^/.*[^/]$"
LABEL_PATTERN: Final = r"^[a-z]([a-z0-9-]*[a-z0-9])?$"
"""The beginning of a run's name."""
NAME_PATTERN: Final = r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"
"""Name of an object of Kubernetes."""
PATTERN_HINTS: Final = {
    AMOUNT_PATTERN: "an amount is needed, such as 8Gi or 500M",
    FOLDER_PATTERN: "an absolute path is needed, with no slash at its end",
    LABEL_PATTERN: "small letters, digits and hyphens are needed, with a letter first and no hyphen last",
    NAME_PATTERN: "small letters, digits, dots and hyphens are needed, with a letter or digit first and last",
}


def section(name: str) -> dict[str, Any]:
    """Put a field into a section of the trigger form."""
    return {"section": name}


def words(value: object) -> object:
    """Split text as a shell does."""
    return shlex.split(value) if isinstance(value, str) else value


def null(value: object) -> object:
    """Read the word null as None: the trigger form and the command line have only text."""
    return None if value == "null" else value


def passable(value: Any) -> Any:
    """Return a value unchanged if it can be passed to a process.

    Raises:
        ValueError: It has a NUL character.
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
