"""Literals of Python against Python's own reading of them, and JSON against that of JSON."""

from __future__ import annotations

import ast
import json

import pytest

from actors.text.formats.python_literal import python_literal
from actors.text.formats.source import NoCall, Reading, Source


def written(text: str) -> str:
    """Return the JSON of a literal with which a text begins, and demand that it is the whole text."""
    source, found = Source(), list[str]()

    def reading() -> Reading[None]:
        found.append((yield from python_literal(source)))

    steps = reading()
    next(steps, None)
    for character in text:
        source.add(character)
        next(steps, None)
    source.ended = True
    next(steps, None)
    assert source.held == len(text), "an attempt holds all of its text"
    assert source.between(0, source.mark) == text
    return found[0]


def value(text: str) -> object:
    return json.loads(written(text))


@pytest.mark.parametrize(
    "text",
    [
        "3",
        "-1_000",
        "+2.5e-3",
        ".5",
        "5.",
        "True",
        "None",
        "''",
        '"it\'s"',
        "'a\\n\\t\\\\\\'\\x41\\u00e9\\U0001F600'",
        "'''a'b''c'''",
        '"""line\nline"""',
        "'a' \"b\"",
        "[]",
        "[1, 'a', [None, True],]",
        "{}",
        "{'a': {'b': [1.5]}, \"c\": -2,}",
        " 3",
    ],
)
def test_a_literal_has_its_value_in_python(text: str) -> None:
    assert value(text) == ast.literal_eval(text.strip())


def test_words_of_json_and_tuples_are_read_too() -> None:
    assert value("[true, false, null, (1, 2), (3), ()]") == [True, False, None, [1, 2], 3, []]
    assert value("'a\nb'") == "a\nb"
    assert value(r"'\q'") == r"\q"


@pytest.mark.parametrize(
    "text",
    [
        r'"\/ \" \\ \b\f\n\r\t \u00e9\u0000"',
        r'"\ud83d\ude00 \uDE00"',
        '"日本 😀"',
        '[true, {"a": [null, -0, 1.50E+2]}, false, ""]',
        '{"a": 1, "a": 2}',
        "12345678901234567890.12345",
        "9" * 5000,
    ],
)
def test_json_has_its_value_in_json(text: str) -> None:
    # Python reads no integer of so many digits.
    assert json.loads(written(text), parse_int=str) == json.loads(text, parse_int=str)


def test_a_number_of_json_stays_as_it_is() -> None:
    for number in ("1e999", "-0", "1.50", "9" * 5000):
        assert written(number) == number


def test_a_slash_is_escaped_in_json_alone() -> None:
    assert value(r"'\/'") == r"\/"
    assert value(r'"\/"') == "/"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "1 + 1 +",
        "--1",
        "+1e999",
        "1__0e",
        "'a",
        "'\\x4'",
        "'\\U00110000'",
        "[1 2]",
        "[,]",
        "{1: 2}",
        "{'a' 1}",
        "f'a'",
        "+" + "9" * 1001,
        "[" * 65 + "]" * 65,
    ],
)
def test_what_is_no_literal_is_no_call(text: str) -> None:
    with pytest.raises((NoCall, AssertionError)):
        value(text)
