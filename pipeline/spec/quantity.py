"""Parse and format amounts: of memory and cores as Kubernetes writes them, of things as people do.

>>> read("512Gi")
549755813888
>>> shown(1536 << 20)
'1.5 GiB'
>>> half("3Gi"), half("500M")
('1536Mi', '250000000')
>>> of_cores(4), of_cores(0.5)
('4', '500m')
"""

import re
from typing import Final

from manycpu.pipeline.spec.patterns import AMOUNT

__all__ = ["counted", "half", "of_cores", "read", "shown"]

_BINARY: Final = ("", "Ki", "Mi", "Gi", "Ti")
_DECIMAL: Final = ("", "k", "M", "G", "T")


def read(text: str) -> int:
    """Parse an amount of memory, in bytes.

    Raises:
        ValueError: It is none.
    """
    if not re.match(AMOUNT, text):
        raise ValueError(f"{text!r} is no amount of memory, such as 512Gi")
    number = text.rstrip("KMGTki")
    unit = text[len(number) :]
    base, units = (1024, _BINARY) if unit in _BINARY else (1000, _DECIMAL)
    return int(float(number) * base ** units.index(unit))


def shown(size: float) -> str:
    """Format bytes for people."""
    power = next((power for power in range(4) if size < 1000 * 1024**power), 4)
    return f"{round(size / 1024**power, 1):g} {_BINARY[power] + 'B' if power else 'B'}"


def counted(count: float, noun: str, plural: str = "s") -> str:
    """Format a count with its noun: ``1 process``, ``2.5 cores``."""
    return f"{count:g} {noun}{plural if count != 1 else ''}"


def half(text: str) -> str:
    """Halve an amount of memory, in the largest binary unit that leaves no fraction."""
    amount = read(text) // 2
    for power in range(len(_BINARY) - 1, 0, -1):
        if amount and amount % 1024**power == 0:
            return f"{amount // 1024**power}{_BINARY[power]}"
    return str(amount)


def of_cores(cores: float) -> str:
    """Format a number of cores as Kubernetes does, to a thousandth."""
    thousandths = round(cores * 1000)
    return f"{thousandths}m" if thousandths % 1000 else str(thousandths // 1000)
