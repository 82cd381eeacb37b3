"""Small words of others and of our own: versions, truths, the first of many."""

from collections.abc import Sequence
from typing import Final

__all__ = ["first_of", "is_true", "public"]

_TRUE: Final = {"1", "on", "t", "true", "y", "yes"}


def public(version: str) -> str:
    """Leave out what tells builds of a version apart.

    >>> public("2.15.0+cpu")
    '2.15.0'
    """
    return version.partition("+")[0]


def is_true(text: str) -> bool:
    """Whether a text means true to Accelerate, in its variables and configs.

    >>> is_true("Yes"), is_true("no"), is_true("")
    (True, False, False)
    """
    return text.lower() in _TRUE


def first_of(names: Sequence[str]) -> str:
    """Name the first of some things, and how many more there are.

    >>> first_of(["a.txt"]), first_of(["a.txt", "b", "c"])
    ('a.txt', 'a.txt (and 2 more)')
    """
    return f"{names[0]} (and {len(names) - 1} more)" if len(names) > 1 else names[0]
