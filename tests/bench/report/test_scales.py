"""Axes hold their values, and their marks are round and far enough apart."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.report.scales import at_points, linear, logarithmic, mark, number

values = st.lists(st.floats(1e-6, 1e9), min_size=1, max_size=20)


@given(values, st.booleans())
def test_every_value_and_every_mark_lies_on_its_axis(points: list[float], zero: bool) -> None:
    for axis in (linear(points, zero=zero), logarithmic(points)):
        places = [axis.place(each) for each in (*points, *axis.marks)]
        assert all(-1e-6 <= place <= 1 + 1e-6 for place in places)
        assert list(axis.marks) == sorted(set(axis.marks))
        assert len(axis.marks) <= 40


def test_marks_are_round() -> None:
    assert linear([3.0, 97.0]).marks == (0, 20, 40, 60, 80, 100)
    assert linear([0.0]).marks[0] == 0
    assert logarithmic([1.0, 1000.0]).marks == (1, 10, 100, 1000)
    assert logarithmic([2.0, 9.0]).marks == (2, 5)
    assert logarithmic([5.0, 5.0]).least == 2.5


def test_few_points_are_the_marks_unless_they_overlap() -> None:
    axis = logarithmic([1, 1000])
    assert at_points(axis, [1, 8, 64, 256, 1000]).marks == (1, 8, 64, 256, 1000)
    assert at_points(axis, [1, 8, 9, 1000]).marks == (1, 8, 1000)
    assert at_points(axis, list(range(1, 100))).marks == axis.marks


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (5.0, "5"), (1234.5, "1,234"), (12.34, "12.3"), (1.234, "1.23"), (0.01234, "0.0123"), (1e-5, "1.00e-05"), (-2.5, "-2.50"), (1e20, "1e+20")],
)  # fmt: skip
def test_a_number_has_three_digits_that_count(value: float, text: str) -> None:
    assert number(value) == text
    assert float(number(value).replace(",", "")) == pytest.approx(value, rel=0.01, abs=0)


def test_a_mark_is_short() -> None:
    assert [mark(each) for each in (0.0, 0.5, 20.0, 1000.0, 25_000.0)] == ["0", "0.5", "20", "1,000", "25,000"]
    assert math.isclose(float(mark(0.3)), 0.3)
