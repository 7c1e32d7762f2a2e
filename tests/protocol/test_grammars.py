"""What is seen of a grammar by reading it: every ordinary one passes, and what is always dear is refused by a sentence."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.grammars import COUNT_MAX, DEPTH_MAX, EMPTIES_MAX, find_mistake
from protocol.messages import Grammar, GrammarKind
from tests.rig.grammar_samples import ATTACKS, BENIGN, Sample


def regex(text) -> str | None:
    return find_mistake(Grammar(GrammarKind.REGEX, text))


def ebnf(text) -> str | None:
    return find_mistake(Grammar(GrammarKind.EBNF, text))


@pytest.mark.parametrize("sample", BENIGN, ids=lambda sample: sample.name)
def test_what_the_field_uses_every_day_passes(sample: Sample) -> None:
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
def test_b2_parts_in_a_row_that_may_each_be_empty_are_counted_wherever_they_stand(text: str) -> None:
    assert "parts in a row that may each be empty" in regex(text)


def test_the_bounds_are_what_they_are_said_to_be() -> None:
    assert regex("a*" * EMPTIES_MAX) is None
    assert regex("a*" * (EMPTIES_MAX + 1)) is not None
    assert regex("a*b" * EMPTIES_MAX) is None  # no two beside each other
    assert regex(f"a{{{COUNT_MAX}}}") is None
    assert "100,001" in regex(f"a{{{COUNT_MAX + 1}}}")
    assert "1,000,000" in regex("((a{100}){100}){100}")
    assert regex("(" * DEPTH_MAX + "a" + ")" * DEPTH_MAX) is None
    assert "nested" in regex("(" * (DEPTH_MAX + 1) + "a" + ")" * (DEPTH_MAX + 1))


@pytest.mark.parametrize("text", [r"[(*)*]" * 300, r"\(\*" * 300, r"\*\?" * 300, "[]a*?]" * 300, "a{,x}" * 300])
def test_what_stands_in_a_class_or_behind_a_backslash_is_text(text: str) -> None:
    assert regex(text) is None


@pytest.mark.parametrize(
    ("text", "said"),
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
def test_rules_are_read_too(text: str, said: str | None) -> None:
    found = ebnf(text)
    assert found is None if said is None else said in found


def test_schemas_and_tags_are_read_for_the_patterns_that_they_hold() -> None:
    bad = "(a*)*" * 300
    schema = {"type": "object", "properties": {"pattern": {"type": "string", "pattern": bad}}}
    of_keys = {"type": "object", "patternProperties": {bad: {}}}
    for held in (schema, of_keys):
        said = find_mistake(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(held)))
        assert said.startswith(
            "this JSON schema cannot be used because of a regular expression in it: it has 300 parts"
        )
    tag = {"type": "structural_tag", "format": {"type": "grammar", "grammar": 'root ::= s\ns ::= s s | ""'}}
    assert "an EBNF grammar in it: its rule s" in find_mistake(Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(tag)))
    assert find_mistake(Grammar(GrammarKind.JSON_SCHEMA, "no JSON")) is None  # whoever compiles it says so


@given(st.text(alphabet="(a*)+?{1,9}|[]\\:=\"' \n#r", max_size=200))
def test_no_text_is_too_strange_to_be_read(text: str) -> None:
    for kind in (GrammarKind.REGEX, GrammarKind.EBNF):
        find_mistake(Grammar(kind, text))


@pytest.mark.parametrize(
    "text", ["(" * 32_768, "(a*)*" * 6_000, "a{99999999999999999999}" * 1_000, "[" * 32_768, "\\" * 32_767]
)
def test_reading_takes_time_in_proportion_to_the_length(text: str) -> None:
    began_at = time.process_time()
    regex(text)
    ebnf(f"root ::= {text}")
    assert time.process_time() - began_at < 1.0  # some 50 ms; a square would take minutes


def test_reading_alone_finds_most_of_what_hurts() -> None:
    found = [sample for sample in ATTACKS if find_mistake(Grammar(GrammarKind(sample.kind), sample.text))]
    assert len(ATTACKS) >= 40
    assert len(found) > len(ATTACKS) // 2
