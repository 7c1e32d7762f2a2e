"""The texts of a regular expression that begin with some characters."""

from __future__ import annotations

from attrs import evolve

from protocol.schemas.characters import CharacterSet, intersection
from protocol.schemas.expressions import EMPTY, NOTHING, Alternation, Chars, Expression, Repeat, Sequence
from protocol.schemas.lengths import lengths, simplified


def beginning_with(tree: Expression, begins: CharacterSet) -> Expression:
    """Narrow an expression without anchors to the empty text and texts that begin so, `NOTHING` if there are none."""
    empty = (EMPTY,) if _may_be_empty(tree) else ()
    return simplified(Alternation((*empty, begun(tree, begins))))


def begun(tree: Expression, begins: CharacterSet) -> Expression:
    """Narrow an expression without anchors to texts that begin so, without the empty one."""
    match tree:
        case Chars(ranges):
            return Chars(intersection(ranges, begins))
        case Sequence(parts):
            # The text begins in the first part, or in a later one while those before it are empty.
            last = next((index for index, part in enumerate(parts) if not _may_be_empty(part)), len(parts) - 1)
            found = (Sequence((begun(parts[index], begins), *parts[index + 1 :])) for index in range(last + 1))
            return Alternation(tuple(found))
        case Alternation(parts):
            return Alternation(tuple(begun(part, begins) for part in parts))
        case Repeat(part, least, most) if most != 0:
            rest = evolve(tree, least=max(0, least - 1), most=None if most is None else most - 1)
            return Sequence((begun(part, begins), rest))
        case _:
            return NOTHING


def _may_be_empty(tree: Expression) -> bool:
    return lengths(tree)[0] == 0
