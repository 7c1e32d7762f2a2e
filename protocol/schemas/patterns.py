"""Regular expressions of clients, decided by one rule wherever they stand: in schemas, tags, and the field `regex`."""

from __future__ import annotations

from functools import lru_cache

from protocol.schemas.decimals import without_look_ahead
from protocol.schemas.edges import without_edges
from protocol.schemas.expression_text import in_text
from protocol.schemas.expressions import NOTHING, BadExpression, Expression, parse
from protocol.schemas.lengths import simplified
from protocol.schemas.matching import is_found
from protocol.schemas.repetition import written_out


def text_pattern(pattern: str) -> str:
    """Return the regular expression of whole answers for an engine; raises `BadExpression`."""
    return in_text(_some(without_edges(parse(pattern))))


@lru_cache(1024)
def string_expression(pattern: str) -> Expression:
    """Return the expression of whole strings that match a pattern; raises `BadExpression`."""
    tree = _some(without_edges(parse(without_look_ahead(pattern))))
    written_out(tree)
    return tree


@lru_cache(1024)
def found_in(pattern: str, text: str, *, loose: bool = False) -> bool:
    """Return whether a pattern is found anywhere in a text, in every dialect or in any; raises `BadExpression`."""
    return is_found(parse(without_look_ahead(pattern), loose=loose), text)


def _some(tree: Expression) -> Expression:
    kept = simplified(tree)
    if kept == NOTHING:
        raise BadExpression("no text matches it")
    return kept
