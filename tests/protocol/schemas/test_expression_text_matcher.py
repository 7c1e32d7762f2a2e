"""The grammar backend's matcher accepts of short strings those that Python's regular expressions match as a whole."""

from __future__ import annotations

import json
import re
from itertools import product
from random import Random

import pytest

pytest.importorskip("xgrammar")  # it comes with an engine

import xgrammar

from protocol.schemas.expression_text import in_json
from protocol.schemas.patterns import string_expression
from tests.rig.schema_answers import answer, compiled

TEXTS = ["".join(letters) for length in range(6) for letters in product("abx", repeat=length)]


@pytest.mark.parametrize(
    "pattern",
    [
        *("a|a{1,3}", "(?:xb*)?a", "(?:b*x)?a", "(?:xb+)?a"),  # an automaton of the backend allows more
        *("(?:(?:a{3,4}){2})?b", "(?:(?:a+|(?:b{3,4})?){2})", "(?:b{3,4})*a", "(?:[ab]?){3,4}(?:a{3,4})?"),
        *("(?:ab|x)+", "a{2,}b?", "[ab]{1,3}x", "(?:a|)(?:b|x)*"),
    ],
)
def test_a_written_pattern_allows_what_the_pattern_matches(pattern: str) -> None:
    grammar = compiled(json.dumps({"type": "string", "pattern": in_json(string_expression(pattern))}))

    def is_accepted(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(grammar)
        return bool(matcher.accept_string(f'"{text}"')) and bool(matcher.is_completed())

    assert [text for text in TEXTS if is_accepted(text)] == [text for text in TEXTS if re.fullmatch(pattern, text)]


@pytest.mark.parametrize("character", ["é", "ࠀ", "漢", "한", "\uffee", "😀", "\U00040000", "\U0010fffd"])
def test_a_class_allows_characters_of_every_length(character: str) -> None:
    for pattern in (r"[\s\S]{2}", "[^a]+", r"[\s\S]{2,500}"):
        matcher = xgrammar.GrammarMatcher(
            compiled(json.dumps({"type": "string", "pattern": in_json(string_expression(pattern))}))
        )
        assert matcher.accept_string(f'"{character}{character}"')


@pytest.mark.parametrize("count", ["{128,400}", "{150,160}", "{150,}", "{100,5000}", "{250}"])
def test_a_token_that_ends_a_long_text_is_allowed_only_where_the_text_may_end(count: str) -> None:
    text = {"type": "string", "pattern": in_json(string_expression(rf"[\s\S]{count}"))}
    grammar = compiled(
        json.dumps({"type": "object", "properties": {"s": text}, "required": ["s"], "additionalProperties": False})
    )
    # `answer` fails where a token is allowed and then refused.
    written = [each for seed in range(10) if (each := answer(grammar, Random(seed), "random")) is not None]
    assert all(re.fullmatch(rf"[\s\S]{count}", json.loads(each)["s"]) for each in written)
