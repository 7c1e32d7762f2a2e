"""Strings: patterns, formats and lengths of several schemas together, as one regular expression."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.schemas.documents import SchemaNode
from protocol.schemas.expressions import COUNT_MAX, NOTHING, BadExpression, Expression
from protocol.schemas.formats import ANNOTATIONS, FORMATS
from protocol.schemas.lengths import lengths, within
from protocol.schemas.patterns import string_expression
from protocol.schemas.shapes import String

_ANY = r"[\s\S]*"


def narrowed_string(nodes: Sequence[SchemaNode]) -> String | None:
    """Return the strings that validate under every node, None if there are none; raises `Unenforceable`."""
    least, most = counts(nodes, "Length")
    if most is not None and most < least:
        return None
    _refuse_beyond(nodes, COUNT_MAX)
    held = {pattern: (node, keyword) for node in nodes for keyword, pattern in patterns(node)}
    if not held:
        return String(None if least == 0 and most is None else within(string_expression(_ANY), least, most))
    # A format beside a pattern is an annotation, as in the standard; the judge of answers has it, too.
    first = "pattern" if any(keyword == "pattern" for _, keyword in held.values()) else "format"
    (pattern, (node, keyword)), *others = ((text, place) for text, place in held.items() if place[1] == first)
    for _, (other, second) in others:
        other.refuse(second, f"a string can be held to one {second}; write all of them as one pattern")
    try:
        expression = string_expression(pattern)
    except BadExpression as error:
        node.refuse(keyword, str(error))
    narrowed = within(expression, least, most)
    if narrowed == NOTHING:
        _refuse_lengths(node, keyword, expression, least, most)
    return String(narrowed)


def _refuse_beyond(nodes: Sequence[SchemaNode], count_max: int) -> None:
    for node in nodes:
        for keyword in ("minLength", "maxLength"):
            if isinstance(count := node.get(keyword), (int, float)) and count > count_max:
                node.refuse(keyword, f"no more than {count_max:,} characters can be counted; leave it out")


def counts(nodes: Sequence[SchemaNode], things: str) -> tuple[int, int | None]:
    """Return how many things there are at least and at most, by every node."""
    leasts = [value for node in nodes if isinstance(value := node.get(f"min{things}"), (int, float))]
    mosts = [value for node in nodes if isinstance(value := node.get(f"max{things}"), (int, float))]
    return int(max(leasts, default=0)), int(min(mosts)) if mosts else None


def patterns(node: SchemaNode) -> list[tuple[str, str]]:
    """Return the pattern of a node and that of its format, each after its keyword; raises `Unenforceable`."""
    found: list[tuple[str, str]] = []
    if isinstance(pattern := node.get("pattern"), str):
        found.append(("pattern", pattern))
    name = node.get("format")
    if isinstance(name, str) and name not in ANNOTATIONS:
        if name not in FORMATS:
            node.refuse("format", f"the format {name!r} is not known here; leave it out, or write a pattern")
        found.append(("format", FORMATS[name]))
    return found


def _refuse_lengths(node: SchemaNode, keyword: str, expression: Expression, least: int, most: int | None) -> None:
    shortest, longest = lengths(expression)
    own = f"{shortest} to {'any number of' if longest is None else longest}"
    allowed = f"{least} to {'any number' if most is None else most}"
    reason = f"its strings have {own} characters, and {allowed} are allowed; say the length in the pattern"
    node.refuse(keyword, reason)
