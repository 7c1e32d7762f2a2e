"""The search for a regular expression agrees with Python's, and takes a bounded number of steps."""

from __future__ import annotations

import re

import pytest

from protocol.schemas.expressions import BadExpression, parse
from protocol.schemas.matching import is_found

PATTERNS = [
    "a",
    "^a",
    "a$",
    "^$",
    "(a|b)+c",
    "^(ab){2,3}$",
    "[^b]{2}",
    "a?b*$",
    "(a*)*b",
    "^a|b$",
    "(^a|c)b",
    "",
    "x{0}b",
]
TEXTS = ["", "a", "b", "ab", "ba", "abab", "ababab", "abc", "cab", "aab", "bb", "xyz", "cb"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_is_found_where_python_finds_it(pattern: str) -> None:
    tree = parse(pattern)
    assert [is_found(tree, text) for text in TEXTS] == [re.search(pattern, text) is not None for text in TEXTS]


def test_a_search_that_would_backtrack_for_ever_ends() -> None:
    assert not is_found(parse("^(a+)+$"), "a" * 40 + "b")
    with pytest.raises(BadExpression, match="too many steps"):
        is_found(parse("^((a?){1000}){1000}b"), "a" * 900)
