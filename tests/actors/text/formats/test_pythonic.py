"""The calls of Llama 4: lists of calls, and answers that only begin like one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from actors.text.call_grammar import call_grammar
from actors.text.formats.table import AnswerFormat
from protocol.errors import BadRequest
from protocol.messages.tools import AUTO, Tool, ToolChoice
from tests.actors.text.formats.reading import read

PYTHONIC = AnswerFormat("pythonic")
REQUIRED = ToolChoice(required=True)


def test_an_answer_may_be_a_list_of_calls() -> None:
    text = "[write(path='p', content=\"it's\"), set( n = 3 , on=True,), now(),]"
    calls = [("write", '{"path": "p", "content": "it\'s"}'), ("set", '{"n": 3, "on": true}'), ("now", "{}")]
    assert read(PYTHONIC, text) == calls
    assert read(PYTHONIC, f"\n{text}\n") == [*calls, ("text", "\n")]
    assert read(PYTHONIC, f"Yes. <|python_start|>{text} <|python_end|> Done.") == [
        ("text", "Yes. "),
        *calls,
        ("text", " Done."),
    ]


def test_of_an_argument_that_comes_twice_the_last_is_kept_as_in_json() -> None:
    """Keys that a schema leaves open may come twice, which no grammar prevents."""
    assert read(PYTHONIC, "[set(n=3, n=4)]") == [("set", '{"n": 4}')]


@pytest.mark.parametrize(
    "text",
    [
        "[1] says so.",
        "[now] is a function.",
        "[now(]",
        "[other()]",
        "[now(), other()]",
        "[set(3)]",
        "[set(n=now())]",
        "[set(n=__import__('os'))]",
        "[]",
        "Call [now()].",
        "<|python_start|>now()<|python_end|>",
        "[now()",
    ],
)
def test_what_is_no_list_of_calls_remains_text(text: str) -> None:
    assert read(PYTHONIC, text) == [("text", text)]


def test_no_call_of_a_list_is_certain_before_its_end() -> None:
    text = "[now(), write(path='p')]"
    for size in range(2, len(text)):
        assert read(PYTHONIC, text[:size], cut=True) == []


def test_a_list_that_was_cut_off_and_cannot_be_calls_is_text() -> None:
    for text in ("[", "[1, 2", "['a', 'b", "[x for x in y"):
        assert read(PYTHONIC, text, cut=True) == [("text", text)]


SCHEMA = {
    "type": "object",
    "properties": {
        "on": {"type": "boolean"},
        "role": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "any": {},
        "one": {"enum": [True, "x"]},
        "list": {"type": "array", "items": {"type": "boolean"}},
    },
}


def allows(text: str, *, choice: ToolChoice = REQUIRED, schema: Any = SCHEMA) -> bool:
    """Return whether an answer is allowed, and demand that what is allowed is read as calls alone."""
    pytest.importorskip("xgrammar")  # it comes with an engine
    from tests.rig.written_calls import ends, parsed

    tools = [Tool("set", parameters=json.dumps(schema), strict=True)]
    held = call_grammar(tools, choice, PYTHONIC, parallel=True)
    assert held is not None
    allowed = bool(ends(held.grammar.text, text))
    if allowed:
        assert parsed(text, PYTHONIC, tools).calls
    return allowed


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("[set()]", True),
        ("[set(on=True)]", True),
        ("[set(on=true, role=None), set(any=False, list=[true])]", True),
        ('[set(role="None", one=True)]', True),
        ("[set(role=True)]", False),
        ("[set(one=False)]", False),
        ("[set(on=None)]", False),
        ("[set(list=[True])]", False),
        ("[set(role=None, on=True)]", False),
        ("[set(on=True,)]", False),
        ("[set()", False),
        ("[]", False),
        ("<|python_start|>[set()]<|python_end|>", False),
    ],
)
def test_a_held_list_has_calls_whose_words_may_be_those_of_python(text: str, allowed: bool) -> None:
    assert allows(text) is allowed


def test_a_free_answer_has_one_list_of_calls_alone_or_between_the_markers() -> None:
    for before in ("", "Yes. "):
        assert allows(f"{before}<|python_start|>[set(on=True)]<|python_end|>", choice=AUTO)
        assert not allows(f"{before}<|python_start|>[set(on=3)]<|python_end|>", choice=AUTO)
        assert not allows(f"{before}<|python_start|>[set()]<|python_end|>[set()]", choice=AUTO)
    assert allows("[set(), set()]", choice=AUTO)
    assert not allows("[set()] Done.", choice=AUTO)


def test_arguments_of_any_name_are_names_that_can_be_read() -> None:
    schema = {"type": "object", "patternProperties": {"^[ a=]*$": {}}, "additionalProperties": False}
    assert allows("[set(a=1, aa=2, a=3)]", schema=schema)
    for name in ("", " ", "a ", "a="):
        assert not allows(f"[set({name}=1)]", schema=schema)


@pytest.mark.parametrize("name", ["", "near by", "a=", "a'", "a,b", "f()", "a" * 257])
def test_a_name_that_no_argument_has_is_refused(name: str) -> None:
    tool = Tool("set", parameters=json.dumps({"properties": {name: {}}}), strict=True, param="tools[0].parameters")
    with pytest.raises(BadRequest, match=r"properties: .*an empty name, .* cannot be written") as raised:
        call_grammar([tool], AUTO, PYTHONIC, parallel=True)
    assert raised.value.param == "tools[0].parameters"
