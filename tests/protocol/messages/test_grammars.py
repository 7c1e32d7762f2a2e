"""The static check of grammars: common ones pass, and shapes that are always costly are refused with a reason."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.messages.generation import Grammar, GrammarKind
from protocol.messages.grammars import COUNT_MAX, DEPTH_MAX, EMPTIES_MAX, find_mistake
from tests.rig.grammar_samples import ATTACKS, BENIGN, Sample


def regex(text: str) -> str | None:
    return find_mistake(Grammar(GrammarKind.REGEX, text))


def ebnf(text: str) -> str | None:
    return find_mistake(Grammar(GrammarKind.EBNF, text))


@pytest.mark.parametrize("sample", BENIGN, ids=lambda sample: sample.name)
def test_common_grammars_pass(sample: Sample) -> None:
    assert find_mistake(Grammar(GrammarKind(sample.kind), sample.text)) is None


@pytest.mark.parametrize(
    "text",
    [
        "(a*)*" * 300 + "b",
        "x" * 20_000 + "(a*)*" * 300,
        "[xy]{300}" + "(a|a)*" * 400,
        "((a*){1,30}){1,30}",
        "(a*)*" * 150 + "b?" * 100,
        "^" + "a?" * 201 + "$",
        "(?:a*|b)" * 300,
        "q(" + "(?P<n>a)*" * 300 + ")",
    ],
)
def test_consecutive_parts_that_may_each_be_empty_are_counted_at_any_depth(text: str) -> None:
    assert "parts in a row that may each be empty" in str(regex(text))


def test_the_limits_are_exact() -> None:
    assert regex("a*" * EMPTIES_MAX) is None
    assert regex("a*" * (EMPTIES_MAX + 1)) is not None
    assert regex("a*b" * EMPTIES_MAX) is None  # no two beside each other
    assert regex(f"a{{{COUNT_MAX}}}") is None
    assert "100,001" in str(regex(f"a{{{COUNT_MAX + 1}}}"))
    assert "1,000,000" in str(regex("((a{100}){100}){100}"))
    assert regex("(" * DEPTH_MAX + "a" + ")" * DEPTH_MAX) is None
    assert "nested" in str(regex("(" * (DEPTH_MAX + 1) + "a" + ")" * (DEPTH_MAX + 1)))


@pytest.mark.parametrize("text", [r"[(*)*]" * 300, r"\(\*" * 300, r"\*\?" * 300, "[]a*?]" * 300, "a{,x}" * 300])
def test_operators_in_a_class_or_behind_a_backslash_are_text(text: str) -> None:
    assert regex(text) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('root ::= s "b"\ns ::= s s | "a" | ""', "its rule s may be empty, and stands beside itself"),
        ('root ::= s\ns ::= t | s e s\nt ::= "a"?\ne ::= ""', "its rule s may be empty, and stands beside itself"),
        ('root ::= s "b" # s ::= s s | ""\ns ::= s "," s | "a"', None),
        ('root ::= e\ne ::= e "+" e | e "*" e | [0-9]+', None),
        ("root ::= " + '"a"? ' * 300, "300 parts in a row"),
        ("root ::= x\nx ::= " + "y " * 300 + '\ny ::= "a"*', "300 parts in a row"),
        ('root ::= "(*)*(*)*"', None),
    ],
)
def test_the_rules_of_an_ebnf_grammar_are_checked(text: str, reason: str | None) -> None:
    sentence = ebnf(text)
    assert sentence is None if reason is None else reason in str(sentence)


def test_patterns_in_schemas_and_structural_tags_are_checked() -> None:
    bad = "(a*)*" * 300
    schema = {"type": "object", "properties": {"pattern": {"type": "string", "pattern": bad}}}
    of_keys = {"type": "object", "patternProperties": {bad: {}}}
    for value in (schema, of_keys):
        sentence = str(find_mistake(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))))
        assert sentence.startswith(
            "this JSON schema cannot be used because of a regular expression in it: it has 300 parts"
        )
    tag = {"type": "structural_tag", "format": {"type": "grammar", "grammar": 'root ::= s\ns ::= s s | ""'}}
    sentence = str(find_mistake(Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(tag))))
    assert "an EBNF grammar in it: its rule s" in sentence
    assert find_mistake(Grammar(GrammarKind.JSON_SCHEMA, "no JSON")) is None  # the compiler refuses it


@given(st.text(alphabet="(a*)+?{1,9}|[]\\:=\"' \n#r", max_size=200))
def test_any_text_can_be_checked(text: str) -> None:
    for kind in (GrammarKind.REGEX, GrammarKind.EBNF):
        find_mistake(Grammar(kind, text))


@pytest.mark.parametrize(
    "text", ["(" * 32_768, "(a*)*" * 6_000, "a{99999999999999999999}" * 1_000, "[" * 32_768, "\\" * 32_767]
)
def test_the_check_takes_time_proportional_to_the_length(text: str) -> None:
    began_at = time.process_time()
    regex(text)
    ebnf(f"root ::= {text}")
    assert time.process_time() - began_at < 10  # some 50 ms; a square would take minutes


def test_the_static_check_finds_most_costly_grammars() -> None:
    found = [sample for sample in ATTACKS if find_mistake(Grammar(GrammarKind(sample.kind), sample.text))]
    assert len(ATTACKS) >= 40
    assert len(found) > len(ATTACKS) // 2
