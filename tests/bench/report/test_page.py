"""A page has every figure of its documents, escapes all text and loads nothing."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest

from bench.report.page import page, sweeps
from bench.rig import result
from bench.rig.result import Curve, Distribution, Figure, Result, Sweep, Table


def document(*figures: Figure, **more: Any) -> Result:
    usual: dict[str, Any] = {
        "schema": "s/1",
        "title": "T",
        "command": ["python", "-m", "bench", "x"],
        "begun_at": "now",
        "versions": {"python": "3"},
        "machine": {"cores": 2},
        "figures": figures,
    }
    return Result(**usual | more)


VOID = {"meta", "line", "polyline", "polygon"}


class Reader(HTMLParser):
    """The tags of a page with their attributes, its text, and what is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


FIGURES = (
    Table(title="CPU", columns=("us", "ours"), rows=(("a", [3.0, 1.0, 2.0]), ("b", None), ("c", [7.0]), ("d", "<no>"))),
    Distribution(title="Waits", unit="ms", series={"one": result.distribution(range(1, 1001)), "none": []}),
    Curve(title="Over clients", x="clients", unit="us", series={"ours": [(1, [5, 6, 9]), (64, [2])]}, logarithmic=True),
)


def test_a_page_has_every_figure_and_its_markup_is_whole() -> None:
    found = Reader(page([document(*FIGURES)], "All"))
    assert found.open == []
    assert all(figure.title in found.text for figure in FIGURES)
    assert [tag for tag, _ in found.found].count("svg") == 2


def test_a_page_loads_nothing() -> None:
    text = page([document(*FIGURES), document()], "All")
    found = Reader(text)
    addresses = [value for _, attributes in found.found for key, value in attributes.items() if key in {"href", "src"}]
    assert addresses == ["#result-0", "#result-1"]
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in found.found}
    assert "url(" not in text
    assert "@import" not in text


def test_all_text_is_escaped() -> None:
    evil = "<b>&\"'"
    figures = (
        Table(title=evil, columns=(evil,), rows=((evil,),), note=evil),
        Curve(title=evil, x=evil, unit=evil, series={evil: [(1, [2])], "": [(1, [3])]}, note=evil),
        Distribution(title=evil, unit=evil, series={evil: result.distribution([1])}, note=evil),
    )
    more = {"title": evil, "command": [evil], "begun_at": evil, "notes": [evil], "versions": {evil: evil}}
    found = Reader(page([document(*figures, **more, machine={evil: evil})] * 2, evil))
    assert "b" not in {tag for tag, _ in found.found}
    assert found.open == []


def test_repeated_values_are_a_median_with_its_ends_and_single_ones_stand_alone() -> None:
    text = page([document(*FIGURES)], "All")
    assert "<td>2<small>1 &ndash; 3</small></td>" in text
    assert "<td>7</td>" in text
    assert "<td>&ndash;</td>" in text
    assert "1: 6 us (5 to 9)" in text


def test_figures_without_values_say_so() -> None:
    empty = (
        Table(title="A", columns=("a",), rows=()),
        Curve(title="B", x="x", unit="y", series={"": []}),
        Distribution(title="C", unit="ms", series={}),
    )
    assert page([document(*empty)], "All").count("Nothing was measured.") == 3


def at(clients: float, value: float | None, series: str = "chat", schema: str = "s/1") -> Result:
    sweep = Sweep(x="clients", value=clients, series=series, measures={"time": ("ms", value)})
    return document(schema=schema, sweep=sweep)


def test_documents_at_several_values_make_a_curve_of_each_series() -> None:
    (curve,) = sweeps([at(8, 3.0), at(1, 1.0), at(8, 5.0), at(1, 7.0, "ws"), at(64, None), document()])
    assert curve.series == {"chat": [(1, [1.0]), (8, [3.0, 5.0])], "ws": [(1, [7.0])]}
    assert (curve.title, curve.x, curve.unit, curve.logarithmic) == ("Time", "clients", "ms", True)


@pytest.mark.parametrize(
    "results", [[], [at(8, 1.0)], [at(8, 1.0), at(8, 2.0)], [at(8, 1.0), at(1, 1.0, schema="t/1")]]
)
def test_documents_at_one_value_or_of_different_kinds_make_none(results: list[Result]) -> None:
    assert sweeps(results) == []
