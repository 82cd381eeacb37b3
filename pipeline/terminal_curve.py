"""Draw a curve in a terminal, of dots in Braille: each character holds two by four of them."""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Final

from manycpu.pipeline.spec.observed import Series

__all__ = ["draw", "spark"]

_BRAILLE: Final = 0x2800
_DOTS: Final = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # row by row, left and right
_BARS: Final = "▁▂▃▄▅▆▇█"


def draw(series: Series, width: int, height: int) -> list[str]:
    """Draw a curve over its steps, or, where it has none, over its values' order.

    Args:
        series: The curve.
        width: Characters of a line.
        height: Lines.

    Returns:
        The lines, from the top; none where there are not two points.
    """
    points = [point for point in zip(_ordinates(series), series.values, strict=True) if _is_place(*point)]
    if len(points) < 2:  # noqa: PLR2004 - a line has two ends
        return []
    across, up = _shares([x for x, _ in points]), _shares([y for _, y in points])
    rows = [[0] * width for _ in range(height)]
    columns, dots = 2 * width - 1, 4 * height - 1
    ends = [(round(x * columns), round((1 - y) * dots)) for x, y in zip(across, up, strict=True)]
    for (left, begin), (right, end) in pairwise(ends):
        steps = max(abs(right - left), abs(end - begin), 1)
        for at in range(steps + 1):
            x, y = left + round((right - left) * at / steps), begin + round((end - begin) * at / steps)
            rows[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
    return ["".join(chr(_BRAILLE + cell) for cell in row) for row in rows]


def spark(series: Series, width: int) -> str:
    """Draw the last values of a curve in one line of bars.

    >>> spark(Series(index=[0, 1, 2], steps=[1, 2, 3], times=[1, 2, 3], values=[2.0, 1.0, 0.0]), 8)
    '█▄▁'
    """
    shares = _shares([value for value in series.thinned(max(width, 4)).values if _is_place(value)])[-width:]
    return "".join(_BARS[int(share * (len(_BARS) - 0.01))] for share in shares)


def _ordinates(series: Series) -> list[float]:
    steps = [step for step in series.steps if step is not None]
    return steps if len(steps) == len(series.steps) else [*series.index]


def _is_place(*numbers: float) -> bool:
    return all(isinstance(number, int) or math.isfinite(number) for number in numbers)


def _shares(values: Sequence[float]) -> list[float]:
    """Place values between the least, 0, and the greatest, 1."""
    if not values:
        return []
    low, high = Fraction(min(values)), Fraction(max(values))  # as floats, what lies between may be infinite
    return [float((Fraction(value) - low) / ((high - low) or 1)) for value in values]
