"""The parts of a structural tag are those that the grammar backend knows."""

from __future__ import annotations

import json

import pytest

from actors.text.formats import call_tags
from actors.text.formats.call_tags import TagPart

NUMBER: TagPart = {"type": "regex", "pattern": "[0-9]"}
A, B = call_tags.tag("<a>", NUMBER, "</a>"), call_tags.tag("<b>", NUMBER, "</b>")


@pytest.mark.parametrize(
    ("tag", "good", "bad"),
    [
        (call_tags.sequence("x", "", NUMBER), ["x1"], ["x", "1"]),
        (call_tags.sequence(NUMBER), ["1"], [""]),
        (call_tags.tag("<a>", call_tags.regex(""), "</a>"), ["<a></a>"], ["<a>1</a>"]),
        (call_tags.optional(NUMBER), ["", "1"], ["12"]),
        (call_tags.text_until("]", "["), ["[]", "[a]"], ["[a", "a]", "[a]b"]),
        (call_tags.separated([A, B], ", ", several=True), ["<a>1</a>", "<a>1</a>, <b>2</b>"], ["", "<a>1</a>, "]),
        (call_tags.separated([A, B], ", ", several=False), ["<b>1</b>"], ["<a>1</a>, <b>2</b>"]),
        (call_tags.triggered("<", [A, B], several=True), ["", "x", "x<a>1</a>y<b>2</b>"], ["<", "<a>", "<c>"]),
        (call_tags.triggered("<", [A, B], several=False), ["", "x", "x<a>1</a>"], ["x<a>1</a>y"]),
    ],
    ids=json.dumps,
)
def test_each_part_allows_what_it_says(tag: TagPart, good: list[str], bad: list[str]) -> None:
    pytest.importorskip("xgrammar")
    from tests.rig.written_calls import ends  # it comes with an engine

    whole = json.dumps({"type": "structural_tag", "format": tag})
    assert [text for text in good if not ends(whole, text)] == []
    assert [text for text in bad if ends(whole, text)] == []
