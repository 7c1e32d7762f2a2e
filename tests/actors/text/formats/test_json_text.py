"""JSON as a model writes it."""

from __future__ import annotations

import json

import pytest

from actors.text.formats.json_text import LEVELS_MAX, json_scalar, json_string, json_value
from actors.text.formats.source import NoCall, Source
from tests.actors.text.formats.test_source import finished, rest, source_of

VALUES = (
    "{}",
    "[ ]",
    '{"a": [1, -2.5e-3, 0, {"b": null}], "c" : {"d":[[], {}]} }',
    '"a\\u00e9\\"\\\\ </tool_call>"',
    "true",
    '[false,null,"日本🙂"]',
)
NO_VALUES = (
    "",
    "x",
    "{,}",
    '{"a"}',
    '{"a":}',
    "{a: 1}",
    "[1,]",
    "[1 2]",
    '"a\n"',
    '"\\x"',
    '"\\u12g4"',
    "01",
    "-",
    "nul",
    "NaN",
)


@pytest.mark.parametrize("text", VALUES)
def test_a_value_ends_by_its_own_syntax(text: str) -> None:
    whole, parts = source_of(f" {text}, 1"), Source()
    assert finished(json_value(whole), whole) == text
    assert finished(json_value(parts), parts, " ", *text, ", 1") == text
    assert rest(whole) == rest(parts) == ", 1"
    json.loads(text)


@pytest.mark.parametrize("text", NO_VALUES)
def test_other_text_is_no_value(text: str) -> None:
    source = source_of(text)
    with pytest.raises(NoCall):
        finished(json_value(source), source)


def test_a_value_that_was_cut_off_is_none() -> None:
    for size in range(1, len(VALUES[2])):
        source = source_of(VALUES[2][:size])
        with pytest.raises(NoCall):
            finished(json_value(source), source)
        assert rest(source) == ""


def test_nesting_has_a_limit() -> None:
    source = source_of("[" * LEVELS_MAX + "]" * LEVELS_MAX)
    assert len(finished(json_value(source), source)) == 2 * LEVELS_MAX
    source = source_of("[" * 100_000)
    with pytest.raises(NoCall):
        finished(json_value(source), source)


def test_a_scalar_is_no_object_and_a_string_nothing_else() -> None:
    source = source_of("-1.5e3]")
    assert finished(json_scalar(source), source) == "-1.5e3"
    for step, text in ((json_scalar, "{}"), (json_string, "1")):
        source = source_of(text)
        with pytest.raises(NoCall):
            finished(step(source), source)
