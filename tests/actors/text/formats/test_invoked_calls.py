"""The calls of DeepSeek's DSML and of MiniMax M2: what ends a value, and the types of values."""

from __future__ import annotations

import json

import pytest

from actors.text.formats.invoked_calls import MINIMAX_M2, dsml
from actors.text.formats.table import AnswerFormat
from tests.actors.text.formats.mixtures import DSML
from tests.actors.text.formats.reading import read

V4 = AnswerFormat("deepseek-v4", "think")
M2 = AnswerFormat("minimax-m2", "think")
SECTION, SECTION_END = f"<{DSML}tool_calls>\n", f"</{DSML}tool_calls>"


def call(*values: tuple[str, str, str], tool: str = "write") -> str:
    parameters = "".join(
        f'<{DSML}parameter name="{name}" string="{string}">{value}</{DSML}parameter>\n'
        for name, string, value in values
    )
    return f'<{DSML}invoke name="{tool}">\n{parameters}</{DSML}invoke>\n'


@pytest.mark.parametrize(
    "value",
    [
        f"a</{DSML}parameter>b",
        f"a</{DSML}parameter>\n</{DSML}invoke> b",
        f"a</{DSML}parameter>\n<{DSML}parameter name=x>b",
        f'a</{DSML}parameter>\n<{DSML}parameter name="x" string="no">b',
        f'<{DSML}invoke name="now">',
        SECTION_END,
        " \n kept \n ",
        "",
    ],
)
def test_markers_and_white_space_in_a_value_belong_to_it(value: str) -> None:
    text = f"{SECTION}{call(('content', 'true', value), ('path', 'true', 'p'))}{call(tool='now')}{SECTION_END}"
    written = json.dumps({"content": value, "path": "p"}, ensure_ascii=False)
    assert read(V4, f"Yes.\n\n{text}") == [("text", "Yes."), ("write", written), ("now", "{}")]


def test_an_attribute_tells_strings_from_json_and_the_schema_decides_without_one() -> None:
    values = (
        ("any", "true", "3"),
        ("n", "false", "3"),
        ("x", "false", "[1]"),
        ("on", "true", "true"),
        ("y", "false", "-"),
    )
    text = f"{SECTION}{call(*values, tool='set')}{SECTION_END}"
    assert read(V4, text) == [("set", '{"any": "3", "n": 3, "x": [1], "on": true, "y": "-"}')]
    text = '<minimax:tool_call>\n<invoke name="set">\n<parameter name="n">3</parameter>\n<parameter name="any">x</parameter>'
    assert read(M2, f"{text}\n</invoke>\n</minimax:tool_call>") == [("set", '{"n": 3, "any": "x"}')]


def test_json_decides_where_a_list_ends() -> None:
    value = f'["</{DSML}parameter></{DSML}invoke>{SECTION_END}"]'
    for string in "true", "false":
        text = f"{SECTION}{call(('items', string, value), tool='nest')}{SECTION_END}"
        assert read(V4, text) == [("nest", json.dumps({"items": json.loads(value)}, ensure_ascii=False))]


def test_a_call_may_have_no_body_and_a_section_no_end() -> None:
    text = f'{SECTION}<{DSML}invoke name="now"/>\n<{DSML}invoke name="now.utc" />'
    assert read(V4, text) == [("now", "{}"), ("now.utc", "{}")]
    assert read(V4, f"{text}\nDone.") == [("now", "{}"), ("now.utc", "{}"), ("text", "\nDone.")]


@pytest.mark.parametrize(
    "text", [f"{SECTION}It is.", SECTION + call(tool="other"), f'{SECTION}<{DSML}invoke name="now">-']
)
def test_what_is_no_call_remains_text(text: str) -> None:
    assert read(V4, f"So:\n\n{text}") == [("text", f"So:\n\n{text}")]


def test_a_call_that_is_cut_off_is_left_out() -> None:
    first, second = f"{SECTION}{call(tool='now')}", call(("path", "true", "p"))
    for size in range(len(second) - 1):
        assert read(V4, f"{first}{second[:size]}", cut=True) == [("now", "{}")]


def test_markers_are_those_of_the_elements() -> None:
    assert {f"<{DSML} calls>", f"</{DSML} calls>", f"<{DSML} invoke", DSML} <= {*dsml("calls", " ").markers}
    assert {"<minimax:tool_call>", "</minimax:tool_call>"} <= {*MINIMAX_M2.markers}
