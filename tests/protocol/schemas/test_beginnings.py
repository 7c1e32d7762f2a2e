"""The texts of a regular expression that begin with some characters."""

from __future__ import annotations

from itertools import product

import pytest

from protocol.schemas.beginnings import beginning_with
from protocol.schemas.characters import characters
from protocol.schemas.expressions import NOTHING, Edge, Expression, Sequence, parse
from protocol.schemas.matching import is_found

TEXTS = ["".join(letters) for size in range(5) for letters in product("ab1", repeat=size)]


@pytest.mark.parametrize(
    "expression",
    ["", "a", "1", "[a-z]*1", "a?b?1?", "(a|1)*b", "(1|a){2,3}", "(a?){3}b", "(a{0}|b)1*", "a*", "[ab]+|1+", "1{0}a"],
)
def test_the_texts_are_those_that_are_empty_or_begin_so(expression: str) -> None:
    whole = parse(f"^({expression})$")
    kept = beginning_with(parse(f"({expression})"), characters("ab"))
    for text in TEXTS:
        wanted = is_found(whole, text) and text[:1] in {"", "a", "b"}
        assert _matches(kept, text) is wanted, text


def test_without_such_texts_it_is_nothing() -> None:
    assert beginning_with(parse("1+|12"), characters("ab")) == NOTHING


def _matches(tree: Expression, text: str) -> bool:
    return is_found(Sequence((Edge("^"), tree, Edge("$"))), text)
