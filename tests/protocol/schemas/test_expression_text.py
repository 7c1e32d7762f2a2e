"""The texts of patterns for the grammar backend: JSON strings, and neither automata nor counts that it gets wrong."""

from __future__ import annotations

import pytest

from protocol.schemas.expression_text import in_json
from protocol.schemas.expressions import BadExpression
from protocol.schemas.patterns import string_expression

# Adjacent ranges are in two classes, since an automaton makes one range of them and gets its bytes wrong.
NOT_A = (
    r"(?:[ -!#-\[\]-`b-\u007f\u0800-\u0fff\ud000-\ud7ff\u{10000}-\u{3ffff}\u{100000}-\u{10ffff}]"
    r"|[\u0080-\u07ff\u1000-\ucfff\ue000-\uffff\u{40000}-\u{fffff}])"
)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("^[a-c]+x?$", "[a-c]+x{0,1}"),
        ('^"$', r'(?:\\")é{0}'),
        (r"^\n\\$", r"(?:\\n\\\\)é{0}"),
        ("a|a{1,3}", "(?:a|a{1,3})é{0}"),  # the automaton would allow aaaa
        ("(?:ab){2}", "(?:ab){2}"),
        ("(?:a{3,4}a?){2}c", "(?:a{3,4}a{0,1}a{3,4}a{0,1}c)é{0}"),  # a count inside of a count is miscounted
        ("[^a]", NOT_A),
    ],
)
def test_a_pattern_is_written_for_the_text_between_quotation_marks(pattern: str, text: str) -> None:
    assert in_json(string_expression(pattern)) == text


@pytest.mark.parametrize(
    ("pattern", "kept"),
    [
        (r"[\d\n]", "[0-9]"),
        (r"\s", " "),
        ('["a]', "a"),
        (r"\w", "[0-9A-Z_a-z]"),
        (r"\W", r"[ -!#-/:-@\[\]-\^`{-\u007f]"),
    ],
)
def test_a_class_is_narrowed_to_what_stands_raw_in_a_string_and_means_the_same_everywhere(
    pattern: str, kept: str
) -> None:
    assert in_json(string_expression(pattern)) == kept


def test_counts_of_groups_that_would_become_too_long_are_refused() -> None:
    with pytest.raises(BadExpression, match="count single characters"):
        string_expression("(?:(?:ab){1000}c?){1000}")
