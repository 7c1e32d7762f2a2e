"""Curves and distributions as SVG, drawn by classes of the page's style sheet: it alone knows colours."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from statistics import median

from attrs import frozen

from bench.report.scales import Axis, at_points, linear, logarithmic, mark, number
from bench.rig.result import PERCENTS, Curve, Distribution

WIDTH, HEIGHT = 400.0, 236.0
LEFT, RIGHT, TOP, BOTTOM = 50.0, 20.0, 20.0, 38.0
DOTS_MAX = 40  # a curve with more points is a line alone
COLOURS = 6  # of the style sheet; further series begin again
PERCENT_MARKS = (0.0, 50.0, 90.0, 99.0, 99.9)
WIDE = 50.0  # where the highest 99.9th percentile is so many times the lowest median, the axis is logarithmic


@frozen
class Frame:
    """The area of a chart between its axes."""

    x: Axis
    y: Axis

    def point(self, x: float, y: float) -> tuple[float, float]:
        """Return the place of a value in the drawing."""
        return (
            LEFT + self.x.place(x) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - self.y.place(y) * (HEIGHT - TOP - BOTTOM),
        )

    def path(self, points: Iterable[tuple[float, float]]) -> str:
        """Return a line through points as the value of an attribute."""
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in (self.point(*each) for each in points))


def curve(figure: Curve) -> str:
    """Return a curve: a line through the medians, and a band from the least to the greatest values."""
    drawn = {name: sorted((x, values) for x, values in points if values) for name, points in figure.series.items()}
    xs = [x for points in drawn.values() for x, _ in points]
    ys = [value for points in drawn.values() for _, values in points for value in values]
    if not xs:
        return NOTHING
    horizontal = logarithmic(xs) if figure.logarithmic and min(xs) > 0 else linear(xs, zero=False)
    frame = Frame(at_points(horizontal, xs), linear(ys))
    parts = [
        series_line(frame, place, name, points, figure.unit)
        for place, (name, points) in enumerate(drawn.items())
        if points
    ]
    return _svg(figure.title, axes(frame, figure.x, figure.unit, mark), parts)


NOTHING = '<p class="nothing">Nothing was measured.</p>'


def series_line(frame: Frame, place: int, name: str, points: Sequence[tuple[float, list[float]]], unit: str) -> str:
    """Return one series of a curve, in the colour of its place among all."""
    middles = [(x, median(values)) for x, values in points]
    band = [(x, max(values)) for x, values in points] + [(x, min(values)) for x, values in reversed(points)]
    several = any(len(values) > 1 for _, values in points)
    parts = [f'<polygon class="band" points="{frame.path(band)}"/>'] if several else []
    parts.append(f'<polyline class="line" points="{frame.path(middles)}"/>')
    if len(points) <= DOTS_MAX:
        for (x, middle), (_, values) in zip(middles, points, strict=True):
            left, top = frame.point(x, middle)
            words = f"{name}: " if name else ""
            words += f"{mark(x)}: {number(middle)} {unit}"
            words += f" ({number(min(values))} to {number(max(values))})" if len(values) > 1 else ""
            parts.append(f'<circle cx="{left:.1f}" cy="{top:.1f}" r="3"><title>{escape(words)}</title></circle>')
    return f'<g class="s{place % COLOURS}">{"".join(parts)}</g>'


def distribution(figure: Distribution) -> str:
    """Return the percentiles of each series; the horizontal axis has as much room from 90 to 99 as from 0 to 90."""
    drawn = {name: values for name, values in figure.series.items() if values}
    if not drawn:
        return NOTHING
    shown = [values[:-1] for values in drawn.values()]  # 100 % lies at infinity
    every = [value for values in shown for value in values]
    wide = min(every) > 0 and max(every) > WIDE * min(values[PERCENTS.index(50.0)] for values in shown)
    marks = tuple(map(_nines, PERCENT_MARKS))
    frame = Frame(Axis(0.0, marks[-1], marks), logarithmic(every) if wide else linear(every))
    parts = []
    for place, (name, values) in enumerate(drawn.items()):
        points = [(_nines(percent), value) for percent, value in zip(PERCENTS[:-1], values[:-1], strict=True)]
        dots = [
            _dot(frame, percent, values[PERCENTS.index(percent)], name, figure.unit) for percent in PERCENT_MARKS[1:-1]
        ]
        line = f'<polyline class="line" points="{frame.path(points)}"/>'
        parts.append(f'<g class="s{place % COLOURS}">{line}{"".join(dots)}</g>')
    names = {_nines(percent): f"{percent:g}" for percent in PERCENT_MARKS}
    return _svg(figure.title, axes(frame, "% of the samples are below", figure.unit, names.__getitem__), parts)


def _nines(percent: float) -> float:
    return -math.log10(1 - percent / 100)


def _dot(frame: Frame, percent: float, value: float, name: str, unit: str) -> str:
    left, top = frame.point(_nines(percent), value)
    words = f"{name + ': ' if name else ''}p{percent:g}: {number(value)} {unit}"
    return f'<circle cx="{left:.1f}" cy="{top:.1f}" r="3"><title>{escape(words)}</title></circle>'


def key(series: Mapping[str, object]) -> str:
    """Return the names of the series with their colours; empty where there is nothing to tell apart."""
    if len(series) < 2 and "" in series:
        return ""
    items = (f'<li class="s{place % COLOURS}">{escape(name or "all")}</li>' for place, name in enumerate(series))
    return f'<ul class="key">{"".join(items)}</ul>'


# Parts ------------------------------------------------------------------------------------


def axes(
    frame: Frame, x_name: str, y_name: str, x_mark: Callable[[float], str], y_mark: Callable[[float], str] = mark
) -> str:
    """Return both axes with their names, and a line across the chart at each mark of the vertical one."""
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for value in frame.y.marks:
        _, top = frame.point(frame.x.least, value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{top:.1f}" y2="{top:.1f}"/>')
        parts.append(f'<text class="y" x="{LEFT - 6}" y="{top + 4:.1f}">{y_mark(value)}</text>')
    for value in frame.x.marks:
        left, _ = frame.point(value, frame.y.least)
        parts.append(f'<line class="tick" x1="{left:.1f}" x2="{left:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(f'<text class="x" x="{left:.1f}" y="{bottom + 16}">{x_mark(value)}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(f'<text class="name" x="{LEFT - 6}" y="{TOP - 9}">{escape(y_name)}</text>')
    parts.append(f'<text class="name end" x="{right}" y="{HEIGHT - 5}">{escape(x_name)}</text>')
    return "".join(parts)


def _svg(title: str, axes: str, parts: Iterable[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(title)}">{axes}{"".join(parts)}</svg>'
    )
