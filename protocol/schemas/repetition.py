"""Counted repetitions of groups, written out: the grammar backend (xgrammar 0.2.7) miscounts counts inside of counts.

`(?:(?:a{3,4}){2})?c` allows aaac there. A count of one character is kept, as long as it is in no other count.
"""

from __future__ import annotations

from protocol.schemas.expressions import EMPTY, Alternation, BadExpression, Chars, Expression, Repeat, Sequence

CHARACTERS_MAX = 2000  # of an expression that is written out
OPTIONAL_MAX = 60  # groups inside of each other


def written_out(tree: Expression) -> Expression:
    """Return an expression that matches the same texts without counts of groups; raises `BadExpression`."""
    if tree != (plain := _written_out(tree)) and _size(plain) > CHARACTERS_MAX:
        raise _too_long()
    return plain


def _written_out(tree: Expression) -> Expression:
    match tree:
        case Sequence(parts):
            return Sequence(tuple(map(_written_out, parts)))
        case Alternation(parts):
            return Alternation(tuple(map(_written_out, parts)))
        case Repeat(part, least, most) if not isinstance(part, Chars):
            return _repeated(_written_out(part), least, most)
        case _:
            return tree


def _repeated(part: Expression, least: int, most: int | None) -> Expression:
    optional = 0 if most is None else most - least
    if _size(part) * (least + optional) > CHARACTERS_MAX or optional > OPTIONAL_MAX:
        raise _too_long()
    if most is None:
        loop = Repeat(part, min(least, 1), None)
        return loop if least < 2 else Sequence((*[part] * (least - 1), loop))
    tail: Expression = EMPTY
    for _ in range(optional):
        tail = Alternation((part if tail == EMPTY else Sequence((part, tail)), EMPTY))
    return Sequence((*[part] * least, *([] if tail == EMPTY else [tail])))


def _size(tree: Expression) -> int:
    match tree:
        case Sequence(parts) | Alternation(parts):
            return 1 + sum(map(_size, parts))
        case Repeat(part):
            return 1 + _size(part)
        case _:
            return 1


def _too_long() -> BadExpression:
    return BadExpression(f"counts of groups come to more than {CHARACTERS_MAX:,} characters; count single characters")
