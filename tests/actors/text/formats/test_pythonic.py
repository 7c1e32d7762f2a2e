"""The calls of Llama 4: lists of calls, and answers that only begin like one."""

from __future__ import annotations

import pytest

from actors.text.formats.table import AnswerFormat
from tests.actors.text.formats.reading import read

PYTHONIC = AnswerFormat("pythonic")


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


@pytest.mark.parametrize(
    "text",
    [
        "[1] says so.",
        "[now] is a function.",
        "[now(]",
        "[other()]",
        "[now(), other()]",
        "[set(n=3, n=4)]",
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
