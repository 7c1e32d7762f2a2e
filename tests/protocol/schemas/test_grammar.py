"""Schemas and regular expressions follow one law, by themselves and in structural tags of both forms."""

from __future__ import annotations

import json

import pytest

from protocol.messages.generation import Grammar, GrammarKind
from protocol.schemas.enforceable import Unenforceable
from protocol.schemas.grammar import enforceable_grammar

PATTERN = "^(?=.*[A-Z])[a-zA-Z]{4}$"
BAD = {"type": "object", "properties": {"a": {"type": "string", "pattern": PATTERN}}}
GOOD = {"type": "string", "maxLength": 4}


def tag(content: object) -> dict[str, object]:
    begin = {"type": "const_string", "value": "x"}
    tagged = {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}
    either = {"type": "or", "elements": [begin, {"type": "triggered_tags", "triggers": ["<a>"], "tags": [tagged]}]}
    return {"type": "structural_tag", "format": {"type": "sequence", "elements": [begin, either]}}


def structures(schema: object) -> dict[str, object]:
    return {"structures": [{"begin": "<a>", "schema": schema, "end": "</a>"}], "triggers": ["<a>"]}


def enforced(kind: GrammarKind, value: object) -> str:
    return enforceable_grammar(Grammar(kind, value if isinstance(value, str) else json.dumps(value))).text


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        (GrammarKind.JSON_SCHEMA, BAD, "#/properties/a: pattern: "),
        (GrammarKind.REGEX, PATTERN, "regex: "),
        (
            GrammarKind.STRUCTURAL_TAG,
            tag({"type": "json_schema", "json_schema": BAD}),
            "/tags/0/content/json_schema/properties/a: pattern: ",
        ),
        (
            GrammarKind.STRUCTURAL_TAG,
            tag({"type": "qwen_xml_parameter", "json_schema": BAD}),
            "/content/json_schema/properties/a: pattern: ",
        ),
        (GrammarKind.STRUCTURAL_TAG, tag({"type": "regex", "pattern": PATTERN}), "/tags/0/content: pattern: "),
        (
            GrammarKind.STRUCTURAL_TAG,
            tag({"type": "json_schema", "json_schema": GOOD, "any_order": True}),
            "content: any_order: ",
        ),
        (GrammarKind.STRUCTURAL_TAG, structures(BAD), "#/structures/0/schema/properties/a: pattern: "),
        (GrammarKind.STRUCTURAL_TAG, structures(json.dumps(BAD)), "#/structures/0/schema/properties/a: pattern: "),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_its_place(kind: GrammarKind, value: object, words: str) -> None:
    with pytest.raises(Unenforceable) as refused:
        enforced(kind, value)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (GrammarKind.EBNF, 'root ::= "(?=a)"'),
        (GrammarKind.REGEX, "[a-z]{1,4}"),
        (GrammarKind.STRUCTURAL_TAG, tag({"type": "const_string", "value": PATTERN})),
        (GrammarKind.STRUCTURAL_TAG, tag({"type": "regex", "pattern": "[a-z]{1,4}"})),
        (GrammarKind.STRUCTURAL_TAG, structures(None)),
    ],
)
def test_what_is_not_decided_here_stays_as_it_is(kind: GrammarKind, value: object) -> None:
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    assert enforced(kind, value) == text


def test_a_schema_in_a_tag_becomes_the_one_that_engines_get(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.schemas.grammar.enforceable", lambda _: '{"const":1}')
    for value in (tag({"type": "json_schema", "json_schema": GOOD}), structures(GOOD), structures(json.dumps(GOOD))):
        text = enforced(GrammarKind.STRUCTURAL_TAG, value)
        assert '"maxLength"' not in text
        assert '{"const":1}' in text
