"""A grammar is decided before an engine gets it: written anew, or refused with its reason."""

from __future__ import annotations

import json

import pytest

from actors.text.engine_grammar import engine_grammar
from protocol.errors import BadRequest
from protocol.messages.generation import Grammar, GrammarKind


def test_a_schema_is_written_anew() -> None:
    schema = Grammar(GrammarKind.JSON_SCHEMA, '{"properties":{"a":{"const":1}},"type":"object","title":"x"}')
    assert json.loads(engine_grammar(schema).text)["properties"] == {"a": {"enum": [1]}}


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (GrammarKind.JSON_SCHEMA, '{"type":"no type"}', "this JSON schema cannot be used: #/type: "),
        (GrammarKind.JSON_SCHEMA, '{"not":{}}', "this JSON schema cannot be used: #: not: "),
        (GrammarKind.REGEX, "(a*)*" * 400, "this regular expression cannot be used: it has "),
    ],
)
def test_a_grammar_that_no_engine_keeps_or_affords_is_refused(kind: GrammarKind, text: str, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason.replace("(", r"\(")):
        engine_grammar(Grammar(kind, text))
