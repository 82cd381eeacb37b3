"""Amounts as Kubernetes writes them.

>>> to_bytes("128Gi")
137438953472
>>> half("3Gi"), half("500M")
('1536Mi', '250000000')
>>> of_cores(4), of_cores(0.5)
('4', '500m')
"""

import re
from fractions import Fraction
from typing import Final

__all__ = ["half", "of_cores", "to_bytes"]

_BINARY: Final = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_UNITS: Final = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, **_BINARY}


def to_bytes(quantity: str) -> int:
    """Read an amount of memory, in bytes.

    Raises:
        ValueError: It is none.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z]*)", quantity)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{quantity!r} is no amount of memory such as 8Gi")
    return int(Fraction(match[1]) * _UNITS[match[2]])


def half(quantity: str) -> str:
    """Halve an amount of memory, in the largest binary unit that leaves no fraction."""
    amount = to_bytes(quantity) // 2
    for unit, size in reversed(_BINARY.items()):
        if amount and amount % size == 0:
            return f"{amount // size}{unit}"
    return str(amount)


def of_cores(cores: float) -> str:
    """Write a number of cores, to a thousandth."""
    thousandths = round(cores * 1000)
    return f"{thousandths}m" if thousandths % 1000 else str(thousandths // 1000)
