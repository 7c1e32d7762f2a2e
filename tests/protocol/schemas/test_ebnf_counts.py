"""A range of times over a part that is itself a number of times is found, and nothing else is."""

from __future__ import annotations

from itertools import product

import pytest

from protocol.messages.generation import Grammar, GrammarKind
from protocol.schemas.ebnf_counts import find_count_of_count
from protocol.schemas.enforceable import Unenforceable
from protocol.schemas.grammar import enforceable_grammar


@pytest.mark.parametrize(
    ("rules", "count"),
    [
        ("root ::= ([ab]{3}){1,2}", "{1,2}"),
        ('root ::= ("ab"{2}){1,2} "c"', "{1,2}"),
        ('root ::= (("a" | "b"){2}){2,3}', "{2,3}"),
        ("root ::= (([ab]{2})){1,2}", "{1,2}"),
        ('root ::= ([ab]{3} ""){0,1}', "{0,1}"),
        ("root ::= ([ab]{3}){2,}", "{2,}"),
        ("root ::= x{1,2}\nx ::= [ab]{3}", "{1,2}"),
        ("x ::= [ab]{3}\nroot ::= y{1,2}\ny ::= (x)", "{1,2}"),
    ],
)
def test_a_count_of_a_count_is_found(rules: str, count: str) -> None:
    assert find_count_of_count(rules) == count


KEPT = {
    "root ::= ([ab]{3}){2}": {6},
    "root ::= ([ab]{3})+": {3, 6},
    "root ::= ([ab]{2} [a]){1,2}": {3, 6},
    'root ::= ("a" | [ab]{3}){1,2}': {1, 2, 3, 4, 6},
    "root ::= ([ab] [ab]){1,2}": {2, 4},
    "root ::= x{1,2}\nx ::= [ab] x2\nx2 ::= [ab]{2}": {3, 6},
}


@pytest.mark.parametrize(
    "rules", [*KEPT, "root ::= x{1,2}\nx ::= y\ny ::= x", "root ::= ({1,2}", "root ::= nowhere{1,2}"]
)
def test_other_counts_pass(rules: str) -> None:
    assert find_count_of_count(rules) is None


@pytest.mark.parametrize("rules", KEPT)
def test_the_backend_keeps_what_passes(rules: str) -> None:
    xgrammar = pytest.importorskip("xgrammar")  # it comes with an engine
    letters = xgrammar.TokenizerInfo(["a", "b", "</s>"], stop_token_ids=[2])
    grammar = xgrammar.GrammarCompiler(letters, max_threads=1).compile_grammar(rules)
    lengths = set()
    for length in range(7):
        for text in map("".join, product("ab", repeat=length)):
            matcher = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True)
            if matcher.accept_string(text) and matcher.is_terminated():
                lengths.add(length)
    assert lengths == KEPT[rules]


def test_such_a_grammar_is_refused_by_itself_and_in_a_structural_tag() -> None:
    rules = "root ::= ([ab]{3}){1,2}"
    with pytest.raises(Unenforceable, match=r"#: ebnf: the count \{1,2\} repeats"):
        enforceable_grammar(Grammar(GrammarKind.EBNF, rules))
    tag = '{"type":"structural_tag","format":{"type":"grammar","grammar":"' + rules + '"}}'
    with pytest.raises(Unenforceable, match="#/format: grammar: the count"):
        enforceable_grammar(Grammar(GrammarKind.STRUCTURAL_TAG, tag))
