"""How often a rank tells its pace, and what a program may say of its steps."""

from typing import Final

__all__ = ["EVERY", "samples_of_a_step", "takes"]

EVERY: Final = 10.0
"""Seconds between two events of a rank."""
_SAMPLES: Final[list[int]] = []


def takes(samples: int) -> None:
    """Note how many samples this rank takes in each step of its optimizer; 0: nobody knows."""
    _SAMPLES[:] = [samples]


def samples_of_a_step() -> int | None:
    """Return how many samples this rank takes in each step; None where nobody has said so."""
    return next(iter(_SAMPLES), 0) or None
