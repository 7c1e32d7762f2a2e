"""The plots of docs/performance.md: SVG files that stand by themselves, in the colours of the report's style sheet.

They are shown as images, so they can neither load anything nor inherit a style: each has its own, for light and dark.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

from attrs import frozen

from bench.figures import routing_tables as named
from bench.figures.routing_data import PolicyRun, RoutingData
from bench.report.charts import HEIGHT, LEFT, RIGHT, WIDTH, Frame, axes, series_line
from bench.report.scales import Axis, at_points, linear, logarithmic, mark

STYLE_SHEET = Path(__file__).parents[1] / "report" / "page.css"
KEY_ROW, SAMPLE, LETTER, MARGIN = 18.0, 20.0, 6.4, 12.0  # of the names above a chart; a letter at most, mostly
BOUND_US = 150.0  # that a choice may cost
BOUND_SHARE = 0.9  # of what one engine with all the memory finds
ROW, GROUP_GAP, BAR = 19.0, 26.0, 12.0  # heights in a chart of bars
NAMES_WIDTH, VALUES_WIDTH = 104.0, 60.0
SHOWN = 1.5  # of its own size

# Those of the page that style charts, beside rules for what it has none of.
_RULES = re.compile(r"^(?:svg text|\.grid|\.axis|\.line|circle|\.s\d).*$", re.MULTILINE)
_OWN_RULES = """\
.card { fill: var(--card); }
svg { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
svg text.head { fill: var(--ink); font-weight: 600; }
.bar { fill: currentColor; }
.goal { stroke: var(--warn); stroke-width: 1.5; stroke-dasharray: 5 3; }
svg text.goal { fill: var(--warn); stroke: none; }
"""


@frozen
class Series:
    """A named line of a plot; the values of its points by their place on the horizontal axis."""

    name: str
    points: Sequence[tuple[float, float]]


def plots(data: RoutingData) -> dict[str, str]:
    """Return each plot whose results are kept, by the name of its file."""
    found = dict[str, str]()
    if data.scale:
        found["choice-time.svg"] = choice_time(data)
    if data.cluster:
        found["cluster-bytes.svg"] = cluster_bytes(data)
    if data.policies:
        found["hit-shares.svg"] = hit_shares(data.policies)
    return found


def choice_time(data: RoutingData) -> str:
    """Return the time of a choice over the number of workers."""
    figures = {"p99": "decision_p99_us", "mean": "decision_us", "p50": "decision_p50_us"}
    lines = [Series(name, [(run.workers, run.figures[key]) for run in data.scale]) for name, key in figures.items()]
    vertical = linear([BOUND_US, *(value for each in lines for _, value in each.points)])
    return _curves("Time of a choice over the number of workers", lines, vertical, "us", goal=BOUND_US)


def cluster_bytes(data: RoutingData) -> str:
    """Return the bytes a second of a worker and of the gateway over the number of workers, both axes logarithmic."""
    kinds = {
        "gateway, blocks": (named.BLOCKS, named.GATEWAY_BYTES),
        "gateway, loads": (named.OTHERS, named.GATEWAY_BYTES),
        "worker, blocks": (named.BLOCKS, named.WORKER_BYTES),
        "worker, loads": (named.OTHERS, named.WORKER_BYTES),
    }
    lines = [
        Series(name, [(run.workers, run.figures[f"{period}: {figure}"]) for run in data.cluster])
        for name, (period, figure) in kinds.items()
    ]
    marks = tuple(10.0**power for power in range(1, 8))
    vertical = Axis(marks[0], marks[-1], marks, logarithmic=True)
    return _curves("Bytes a second over the number of workers", lines, vertical, "bytes a second", _bytes)


def _bytes(value: float) -> str:
    size, unit = next((size, unit) for size, unit in ((1e6, "MB"), (1e3, "kB"), (1.0, "B")) if value >= size)
    return f"{value / size:g} {unit}"


def _curves(
    title: str,
    lines: Sequence[Series],
    vertical: Axis,
    unit: str,
    y_mark: Callable[[float], str] = mark,
    goal: float | None = None,
) -> str:
    xs = [x for each in lines for x, _ in each.points]
    frame = Frame(at_points(logarithmic(xs), xs), vertical)
    parts = [axes(frame, "workers", unit, mark, y_mark)]
    names = [(each.name, f"s{place}", "line") for place, each in enumerate(lines)]
    if goal is not None:
        _, y = frame.point(frame.x.least, goal)
        parts.append(f'<line class="goal" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        names.append((f"goal: {goal:g} {unit}", "", "goal"))
    for place, each in enumerate(lines):
        parts.append(series_line(frame, place, each.name, [(x, [value]) for x, value in each.points], unit))
    key, height = _key(names)
    return _svg(title, HEIGHT + height, f'{key}<g transform="translate(0 {height:g})">{"".join(parts)}</g>')


def _key(names: Sequence[tuple[str, str, str]]) -> tuple[str, float]:
    """Return names, each behind a piece of its line, in one row or in two, and the height of those."""
    widths = [SAMPLE + 4 + LETTER * len(name) + MARGIN for name, _, _ in names]
    in_row = len(names) if MARGIN + sum(widths) <= WIDTH else -(-len(names) // 2)
    parts = []
    for place, (name, color, kind) in enumerate(names):
        row, column = divmod(place, in_row)
        left = MARGIN + (sum(widths[:place]) if in_row == len(names) else column * WIDTH / in_row)
        top = KEY_ROW * row
        sample = f'<line class="{kind}" x1="{left:.1f}" x2="{left + SAMPLE:.1f}" y1="{top + 11}" y2="{top + 11}"/>'
        parts.append(f'<g class="{color}">{sample}</g>' if color else sample)
        parts.append(f'<text x="{left + SAMPLE + 4:.1f}" y="{top + 15}">{escape(name)}</text>')
    return "".join(parts), KEY_ROW * -(-len(names) // in_row)


def hit_shares(runs: Sequence[PolicyRun]) -> str:
    """Return the share of prompt tokens that each policy finds in caches, in bars, beside one engine's."""
    parts, top, room = list[str](), 4.0, WIDTH - NAMES_WIDTH - VALUES_WIDTH
    for run in runs:
        shares = {name: statistics.median(each.hit_share) for name, each in run.loads[named.PACED].items()}
        parts.append(f'<text class="head" x="8" y="{top + 13:.1f}">{run.engines} engines: prompt tokens cached</text>')
        top, first = top + ROW, top + ROW
        for name, share in shares.items():
            place = 0 if name == "kv" else 2 if name == named.REFERENCE else 1
            parts.append(_bar(name, share, place, top, room))
            top += ROW
        if (reference := shares.get(named.REFERENCE)) is not None:
            parts.append(_bound(BOUND_SHARE * reference, first, top, room))
        top += GROUP_GAP
    return _svg("Share of prompt tokens that policies find in caches", top, "".join(parts))


def _bar(name: str, share: float, place: int, top: float, room: float) -> str:
    middle, width, upper = top + ROW / 2 + 4, share * room, top + (ROW - BAR) / 2
    bar = f'<rect class="bar" x="{NAMES_WIDTH}" y="{upper:.1f}" width="{width:.1f}" height="{BAR}"/>'
    return (
        f'<text class="y" x="{NAMES_WIDTH - 6}" y="{middle:.1f}">{escape(name)}</text><g class="s{place}">{bar}</g>'
        f'<text x="{NAMES_WIDTH + width + 8:.1f}" y="{middle:.1f}">{100 * share:.1f} %</text>'
    )


def _bound(share: float, top: float, bottom: float, room: float) -> str:
    x = NAMES_WIDTH + share * room
    words = f"goal: {100 * BOUND_SHARE:g} % of one engine's"
    return (
        f'<line class="goal" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom + 3:.1f}"/>'
        f'<text class="goal end" x="{x:.1f}" y="{bottom + 14:.1f}">{words}</text>'
    )


# The file ---------------------------------------------------------------------------------


def _svg(title: str, height: float, body: str) -> str:
    box, text = f'viewBox="0 0 {WIDTH:g} {height:g}"', escape(title)
    size = f'width="{SHOWN * WIDTH:g}" height="{SHOWN * height:g}"'
    style_element = f"<style>\n{style(STYLE_SHEET.read_text())}</style>"
    back = '<rect class="card" width="100%" height="100%"/>'
    lines = body.replace("><", ">\n<")
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} {size} role="img" aria-label="{text}">'
    return "\n".join((head, f"<title>{text}</title>", style_element, back, lines, "</svg>\n"))


def style(sheet: str) -> str:
    """Return the rules of charts with the colours of a style sheet put in: not every viewer of SVG knows variables."""
    rules = "\n".join((*_RULES.findall(sheet), _OWN_RULES))
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#\w+);", block)) for block in re.findall(r":root \{(.*?)\}", sheet, re.DOTALL)
    )
    in_dark = "\n".join(line for line in _colored(rules, dark).splitlines() if "#" in line)
    return f"{_colored(rules, light)}@media (prefers-color-scheme: dark) {{\n{in_dark}\n}}\n"


def _colored(rules: str, colors: Mapping[str, str]) -> str:
    return re.sub(r"var\(--([\w-]+)\)", lambda found: colors[found[1]], rules)
