"""Axes: where a value lies between two ends, which round values get a mark, and how a number is written."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attrs import frozen

DECADES = (1, 2, 5, 10)
MARKS_MAX = 6
POINTS_AS_MARKS_MAX = 8  # an axis with so few points has its marks at them
CLOSEST_MARKS = 0.09  # of an axis: of marks that are closer the later is left out


@frozen
class Axis:
    """An axis from `least` to `most`, linear or logarithmic, with the values of its marks."""

    least: float
    most: float
    marks: tuple[float, ...]
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Return where a value lies, from 0 to 1."""
        if self.logarithmic:
            return math.log(max(value, self.least) / self.least) / math.log(self.most / self.least)
        return (value - self.least) / (self.most - self.least)


def linear(values: Sequence[float], *, zero: bool = True) -> Axis:
    """Return an axis for values, from 0 on unless that is not wanted; it ends at a mark."""
    least, most = min(values, default=0.0), max(values, default=1.0)
    if zero:
        least, most = min(0.0, least), max(0.0, most)
    if least == most:
        most = least + 1.0
    step = _step((most - least) / (MARKS_MAX - 1))
    first, last = math.floor(least / step + 1e-9), math.ceil(most / step - 1e-9)
    marks = tuple(round(number * step, 12) for number in range(first, last + 1))
    return Axis(marks[0] if zero else least, marks[-1] if zero else most, _within(marks, least, most, zero=zero))


def _within(marks: Sequence[float], least: float, most: float, *, zero: bool) -> tuple[float, ...]:
    return tuple(marks) if zero else tuple(mark for mark in marks if least <= mark <= most)


def _step(least: float) -> float:
    """Return the next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in DECADES if factor * power >= least * (1 - 1e-9))


def logarithmic(values: Sequence[float]) -> Axis:
    """Return a logarithmic axis for values above 0, with marks at powers of ten, or between them if it is short."""
    least, most = min(values), max(values)
    if least == most:
        least, most = least / 2, most * 2
    first, last = math.floor(math.log10(least)), math.ceil(math.log10(most))
    for factors in ((1,), (1, 3), (1, 2, 5)):
        marks = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
        inside = tuple(mark for mark in marks if least <= mark <= most)
        if len(inside) >= 3 or factors == (1, 2, 5):
            return Axis(least, most, inside or (least, most), logarithmic=True)
    raise AssertionError("the last factors always return")


def at_points(axis: Axis, points: Sequence[float]) -> Axis:
    """Return the axis with its marks at the points themselves, if they are few, without those that would overlap."""
    distinct = sorted(set(points))
    if not 1 < len(distinct) <= POINTS_AS_MARKS_MAX:
        return axis
    marks: list[float] = []
    for point in distinct:
        if not marks or axis.place(point) - axis.place(marks[-1]) >= CLOSEST_MARKS:
            marks.append(point)
    return Axis(axis.least, axis.most, tuple(marks), axis.logarithmic)


def number(value: float) -> str:
    """Return a number with about three digits that count."""
    size = abs(value)
    if size >= 1e15:
        return f"{value:.3g}"
    if value == int(value) or size >= 100:
        return f"{value:,.0f}"
    if size < 1e-3:
        return f"{value:.2e}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(size)))}f}"


def mark(value: float) -> str:
    """Return the number of a mark, as short as it can be."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"
