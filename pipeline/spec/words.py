"""Parse and format small texts: amounts of memory and cores, counts, versions, truth values.

>>> parse_memory("512Gi")
549755813888
>>> format_bytes(1536 << 20)
'1.5 GiB'
>>> half_of_memory("3Gi"), half_of_memory("500M")
('1536Mi', '250000000')
>>> format_cores(4), format_cores(0.5)
('4', '500m')
"""

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Final

AMOUNT_PATTERN: Final = r"^[0-9]{1,15}(\.[0-9]{1,15})?(Ki|Mi|Gi|Ti|k|M|G|T)?$"
"""An amount of memory or storage, as Kubernetes writes it."""
_TRUE: Final = {"1", "on", "t", "true", "y", "yes"}
_BINARY: Final = ("", "Ki", "Mi", "Gi", "Ti")
_DECIMAL: Final = ("", "k", "M", "G", "T")


def public(version: str) -> str:
    """Remove the local part of a version, which distinguishes builds.

    >>> public("2.15.0+cpu")
    '2.15.0'
    """
    return version.partition("+")[0]


def is_true(text: str) -> bool:
    """Whether a text means true in the variables and config files of the library Accelerate.

    >>> is_true("Yes"), is_true("no"), is_true("")
    (True, False, False)
    """
    return text.lower() in _TRUE


def first_of(names: Sequence[str]) -> str:
    """Write the first of some names, and how many more there are.

    >>> first_of(["a.txt"]), first_of(["a.txt", "b", "c"])
    ('a.txt', 'a.txt (and 2 more)')
    """
    return f"{names[0]} (and {len(names) - 1} more)" if len(names) > 1 else names[0]


def did_you_mean(name: str, choices: Iterable[str], *, min_ratio: float = 0.5) -> str | None:
    """Suggest the choice that :func:`most_like` finds; None: no choice is like the name.

    >>> did_you_mean("ouput", ["data", "output"]), did_you_mean("x", ["data", "output"])
    ("Did you mean 'output'?", None)
    """
    similar = most_like(name, choices, min_ratio=min_ratio)
    return f"Did you mean {similar!r}?" if similar else None


def most_like(name: str, choices: Iterable[str], *, min_ratio: float) -> str | None:
    """Find the choice that is most like a name; None: no choice is like it.

    ``min_ratio``: how similar it must be, as ``difflib`` counts it: from 0 to 1 for equal texts.
    """
    return next(iter(difflib.get_close_matches(name, list(choices), n=1, cutoff=min_ratio)), None)


def parse_memory(text: str) -> int:
    """Parse an amount of memory, in bytes.

    Raises:
        ValueError: The text is no such amount.
    """
    if not re.match(AMOUNT_PATTERN, text):
        raise ValueError(f"{text!r} is no amount of memory, such as 512Gi")
    number = text.rstrip("KMGTki")  # the text without its unit
    unit = text[len(number) :]
    base, units = (1024, _BINARY) if unit in _BINARY else (1000, _DECIMAL)
    return int(float(number) * base ** units.index(unit))


def format_bytes(size: float) -> str:
    """Format a number of bytes for people, in the unit in which the number is below 1000."""
    power = next((power for power in range(4) if size < 1000 * 1024**power), 4)
    return f"{round(size / 1024**power, 1):g} {_BINARY[power]}B"


def counted(count: float, noun: str, plural: str = "s") -> str:
    """Format a count with its noun: ``1 process``, ``2.5 cores``."""
    return f"{count:g} {noun}{plural if count != 1 else ''}"


def half_of_memory(text: str) -> str:
    """Halve an amount of memory, in the largest binary unit that leaves no fraction."""
    amount = parse_memory(text) // 2
    for power in range(len(_BINARY) - 1, 0, -1):
        if amount and amount % 1024**power == 0:
            return f"{amount // 1024**power}{_BINARY[power]}"
    return str(amount)


def format_cores(cores: float) -> str:
    """Format a number of cores as Kubernetes does, rounded to a thousandth: ``500m`` is half a core."""
    thousandths = round(cores * 1000)
    return f"{thousandths}m" if thousandths % 1000 else str(thousandths // 1000)
