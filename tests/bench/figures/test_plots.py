"""The plots stand by themselves, have all figures, and no word of them is outside of the drawing."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest
from attrs import evolve

from bench.figures.plots import LETTER, STYLE_SHEET, plots, style
from bench.figures.routing_data import RoutingData
from tests.bench.figures.routing import DATA

SVG = "{http://www.w3.org/2000/svg}"
PLOTS = plots(DATA)


def texts(name: str) -> list[str]:
    return ["".join(element.itertext()) for element in ET.fromstring(PLOTS[name]).iter(f"{SVG}text")]


@pytest.mark.parametrize("name", PLOTS)
def test_a_plot_is_a_file_that_needs_no_other_and_has_colours_for_light_and_dark(name: str) -> None:
    assert ET.fromstring(PLOTS[name]).tag == f"{SVG}svg"
    assert not any(word in PLOTS[name] for word in ("href", "url(", "@import", "var("))
    assert "prefers-color-scheme: dark" in PLOTS[name]


@pytest.mark.parametrize("name", PLOTS)
def test_no_word_is_cut_off(name: str) -> None:
    root = ET.fromstring(PLOTS[name])
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for element in root.iter(f"{SVG}text"):
        long, x = LETTER * len("".join(element.itertext())), float(element.attrib["x"])
        shares = {"y": 1.0, "end": 1.0, "x": 0.5}
        left = x - long * next((share for word, share in shares.items() if word in element.get("class", "").split()), 0)
        assert left >= 0
        assert left + long <= width + LETTER
        assert 0 < float(element.attrib["y"]) < height


def test_the_time_of_a_choice_has_its_goal_and_a_point_for_each_number_of_workers() -> None:
    assert {"10", "100", "1,000", "workers", "us", "goal: 150 us", "p99", "mean", "p50"} <= set(
        texts("choice-time.svg")
    )
    assert "<title>p99: 1,000: 288 us</title>" in PLOTS["choice-time.svg"]


def test_bytes_are_drawn_on_two_logarithmic_axes() -> None:
    assert {"10 B", "1 kB", "10 MB", "worker, loads", "gateway, blocks"} <= set(texts("cluster-bytes.svg"))
    points = ET.fromstring(PLOTS["cluster-bytes.svg"]).iter(f"{SVG}polyline")
    line = next(points).attrib["points"].split()
    (left, low), (middle, between), (right, high) = ([float(number) for number in point.split(",")] for point in line)
    assert middle - left == pytest.approx(right - middle, abs=0.2)
    assert low - between == pytest.approx(between - high, abs=0.2), "ten times as many bytes each time"


def test_every_policy_has_a_bar_as_long_as_its_share() -> None:
    rects = [each for each in ET.fromstring(PLOTS["hit-shares.svg"]).iter(f"{SVG}rect") if "x" in each.attrib]
    widths = [float(each.attrib["width"]) for each in rects]
    assert len(widths) == 4
    assert widths[1] / widths[0] == pytest.approx(0.8 / 0.4, rel=0.01)
    assert {"2 engines: prompt tokens cached", "3 engines: prompt tokens cached", "80.0 %"} <= set(
        texts("hit-shares.svg")
    )


def test_what_was_not_measured_is_not_drawn() -> None:
    assert plots(RoutingData()) == {}
    assert set(plots(evolve(DATA, scale=(), policies=()))) == {"cluster-bytes.svg"}


def test_the_colours_are_those_of_the_report() -> None:
    sheet = STYLE_SHEET.read_text()
    light, dark = style(sheet).split("@media")
    assert ".s0 { color: #1f66b5; }" in light
    assert ".s0 { color: #6cb0ff; }" in dark
    assert "font-size" in light
