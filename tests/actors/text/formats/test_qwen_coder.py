"""The calls of Qwen3-Coder: what ends a value, what does not, and markers that a model leaves out."""

from __future__ import annotations

import json

import pytest

from actors.text.formats.table import AnswerFormat
from tests.actors.text.formats.reading import read

QWEN = AnswerFormat("qwen3-coder", "qwen3")


def call(*values: tuple[str, str], tool: str = "write", end: str = "\n</tool_call>") -> str:
    parameters = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values)
    return f"<tool_call>\n<function={tool}>\n{parameters}</function>{end}"


@pytest.mark.parametrize(
    "value",
    [
        "a</parameter>b",
        "a\n</parameter>\nb",
        "a\n</parameter>\n</function> b",
        "a\n</parameter>\n</function>\n",
        "a </function> b",
        "a\n<parameter=other>\nb",
        "a\n<parameter=content>\nb",
        "a <parameter=path> b",
        "<tool_call>\n<function=now>\n",
        " \n kept \n ",
        "",
    ],
)
def test_markers_and_white_space_in_a_value_belong_to_it(value: str) -> None:
    pieces = read(QWEN, f"Yes.\n\n{call(('content', value), ('path', 'p'))}\nDone.")
    assert pieces == [
        ("text", "Yes."),
        ("write", json.dumps({"content": value, "path": "p"})),
        ("text", "\nDone."),
    ]


def test_json_decides_where_a_list_ends() -> None:
    text = call(("items", '["\\n</parameter></function></tool_call>"]'), ("note", "null"), tool="nest")
    assert read(QWEN, text) == [("nest", '{"items": ["\\n</parameter></function></tool_call>"], "note": null}')]


def test_types_come_from_the_schema_also_as_python_writes_them() -> None:
    text = call(("n", "3"), ("x", "-0.5"), ("on", "True"), ("any", "None of it"), tool="set")
    assert read(QWEN, text) == [("set", '{"n": 3, "x": -0.5, "on": true, "any": "None of it"}')]


def test_a_value_may_end_with_the_next_parameter_or_with_the_function() -> None:
    text = "<tool_call>\n<function=write>\n<parameter=path>\np\n<parameter=content>\nc\n</function>\n</tool_call>"
    assert read(QWEN, text) == [("write", '{"path": "p", "content": "c"}')]
    text = "<tool_call>\n<function=nest>\n<parameter=items>\n[1]\n<parameter=note>\nc\n</parameter>\n</function>\n</tool_call>"
    assert read(QWEN, text) == [("nest", '{"items": [1], "note": "c"}')]


def test_a_function_may_lack_the_marker_of_its_call() -> None:
    text = call(("path", "p")).removeprefix("<tool_call>\n")
    assert read(QWEN, f"Yes.\n{text}{call(tool='now')}") == [
        ("text", "Yes."),
        ("write", '{"path": "p"}'),
        ("now", "{}"),
    ]
    assert read(QWEN, call(("path", "p"), end="\n") + text) == [("write", '{"path": "p"}')] * 2
    assert read(QWEN, call(("path", "p"), end="")) == [("write", '{"path": "p"}')]
    assert read(QWEN, call(tool="now", end="\nDone.")) == [("now", "{}"), ("text", "\nDone.")]


def test_a_call_ends_a_thought_and_what_is_no_call_does_not() -> None:
    text = f"A <tool_call> is\n<tool_call>\nit.\n{call(tool='now')}\nDone."
    assert read(QWEN, text, thinking=True) == [
        ("reasoning", "A <tool_call> is\n<tool_call>\nit."),
        ("now", "{}"),
        ("text", "\nDone."),
    ]


@pytest.mark.parametrize(
    "text", ["\n<function=other>\n", "\n<tool_call>\nfunction", call(("path", "p"), end=" it is.")]
)
def test_what_is_no_call_remains_text(text: str) -> None:
    assert read(QWEN, f"So: {text}") == [("text", f"So: {text}")]


def test_a_call_that_is_cut_off_is_left_out() -> None:
    whole = call(("path", "p"))
    for size in range(len("<tool_call>"), len(whole) - len("</tool_call>")):
        assert read(QWEN, f"{call(tool='now')}\n{whole[:size]}", cut=True) == [("now", "{}")]
