"""A curve in a terminal, of whatever numbers."""

import pytest

from manycpu.pipeline.display import draw, spark
from manycpu.pipeline.spec.observed import Series


def curve(*values: float) -> Series:
    count = len(values)
    return Series(index=[*range(count)], steps=[*range(count)], times=[1.0] * count, values=[*values])


@pytest.mark.parametrize("size", [1.0, 5e-324, 1e-300, 1e308, 10**400])
def test_a_curve_has_its_shape_at_any_size(size: float) -> None:
    like = [1, 0, 0, 1, 0]
    drawn = draw(curve(*(size if each else -size for each in like)), 8, 2)
    assert drawn == draw(curve(*like), 8, 2)
    assert spark(curve(size, -size), 8) == "█▁"


def test_a_constant_and_no_curve_are_drawn_too() -> None:
    assert len(draw(curve(1e308, 1e308), 8, 2)) == 2
    assert draw(curve(1.0), 8, 2) == []
    assert spark(curve(), 8) == ""


def test_what_is_no_finite_number_is_left_out() -> None:
    odd = [float("nan"), float("inf"), float("-inf")]
    assert draw(curve(*odd), 8, 2) == []
    assert spark(curve(2.0, *odd, 1.0), 8) == "█▁"
    assert len(draw(curve(2.0, *odd, 1.0), 8, 2)) == 2
