"""Calls of Llama 3."""

from __future__ import annotations

from actors.text.formats.answer import Expected
from actors.text.formats.stage import TextPiece
from actors.text.formats.table import AnswerFormat, make_stage
from tests.rig.answers import TOOLS, Part, read

F = ("call", "f", '{"a": "x"}')


def llama(text: str, *, cut: bool = False) -> list[Part]:
    return [*read(text, "llama3", cut=cut)]


def test_an_answer_that_is_an_object_is_a_call() -> None:
    assert llama('{"name": "f", "parameters": {"a": "x"}}') == [F]
    assert llama(' \n{"type": "function", "name": "f", "arguments": {"a": "x"}}') == [F]


def test_objects_with_semicolons_or_white_space_between_them_are_calls() -> None:
    assert llama('{"name": "f", "parameters": {"a": "x"}}; {"name": "g", "parameters": {}}') == [F, ("call", "g", "{}")]
    assert llama('{"name": "f", "parameters": {"a": "x"}}\n{"name": "g", "parameters": {}}') == [F, ("call", "g", "{}")]


def test_objects_behind_the_tag_are_calls_and_the_tag_is_left_out() -> None:
    text = 'I look. <|python_tag|>{"name": "f", "parameters": {"a": "x"}} so'
    assert llama(text) == [("text", "I look. "), F, ("text", " so")]


def test_an_object_in_the_middle_of_an_answer_is_text() -> None:
    text = 'Say {"name": "f", "parameters": {}}'
    assert llama(text) == [("text", text)]


def test_json_without_both_keys_of_a_call_is_text() -> None:
    for text in ('{"name": "f"}', '{"parameters": {}}', '{"a": 1} is a dict', '{"name": "h", "parameters": {}}', "{}"):
        assert llama(text) == [("text", text)]


def test_json_that_cannot_be_a_call_is_text_at_once_and_also_at_a_cut() -> None:
    for text in (
        '{"city": "Par',
        '{"name": "Anna", "age',
        '{"na',
        "{",
        '{"type": "object", "properties": {"a"',
        '{"id": 5',
    ):
        assert llama(text, cut=True) == [("text", text)]
        assert llama(text) == [("text", text)]
    stage = make_stage(AnswerFormat("llama3"), Expected(TOOLS))
    assert stage.feed('{"city":') == [TextPiece('{"city":')]
    assert stage.feed(' "Paris"') == [TextPiece(' "Paris"')]


def test_a_first_call_that_was_cut_off_is_left_out() -> None:
    for text in ('{"name": "f', '{"name": "f"', '{"type": "function", "name": "f", "parameters": {"a"'):
        assert llama(text, cut=True) == []
        assert llama(text) == [("text", text)]


def test_text_behind_the_tag_that_is_no_call_remains_with_the_tag() -> None:
    text = '<|python_tag|>print("oak")'
    assert llama(text) == [("text", text)]


def test_a_second_call_that_was_cut_off_is_left_out() -> None:
    text = '{"name": "f", "parameters": {"a": "x"}}; {"name": "g", "para'
    assert llama(text, cut=True) == [F]
    assert llama(text) == [F, ("text", '; {"name": "g", "para')]
