"""Anchors of a regular expression: an engine matches whole texts, so anchors at the edges are left out."""

from __future__ import annotations

from protocol.schemas.expressions import Alternation, BadExpression, Edge, Expression, Repeat, Sequence


def without_edges(tree: Expression, *, first: bool = True, last: bool = True) -> Expression:
    """Return an expression for whole texts, without its anchors; raises `BadExpression` for an anchor elsewhere.

    `first` and `last` are whether the expression is at the beginning and at the end of the text.
    """
    match tree:
        case Edge(sign):
            if not (first if sign == "^" else last):
                raise BadExpression(f"an anchor ({sign}) in the middle of a pattern cannot be enforced; say it without")
            return Sequence(())
        case Sequence(parts):
            begin = next((index for index, part in enumerate(parts) if not _is_edge(part, "^")), len(parts))
            end = next((index for index in range(len(parts), begin, -1) if not _is_edge(parts[index - 1], "$")), begin)
            kept = (
                without_edges(part, first=first and index <= begin, last=last and index >= end - 1)
                for index, part in enumerate(parts)
            )
            return Sequence(tuple(kept))
        case Alternation(parts):
            return Alternation(tuple(without_edges(part, first=first, last=last) for part in parts))
        case Repeat(part, least, most):
            once = most == 1
            return Repeat(without_edges(part, first=first and once, last=last and once), least, most)
        case _:
            return tree


def _is_edge(part: Expression, sign: str) -> bool:
    return isinstance(part, Edge) and part.sign == sign
