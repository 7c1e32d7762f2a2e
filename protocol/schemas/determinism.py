"""Whether a regular expression is deterministic: the next character alone decides which part of it goes on.

The grammar backend (xgrammar 0.2.7) makes an automaton of a pattern in ASCII. It merges states of automata that are not
deterministic, and then allows strings that the pattern forbids (`a|a{1,3}` allows aaaa).
"""

from __future__ import annotations

from itertools import pairwise

from protocol.schemas.characters import CharacterSet, intersection, union
from protocol.schemas.expressions import Alternation, Chars, Edge, Expression, Repeat, Sequence


def is_deterministic(tree: Expression, follow: CharacterSet = ()) -> bool:
    """Return whether an expression is deterministic where one of some characters, or the end, comes after it."""
    match tree:
        case Sequence(parts):
            for part in reversed(parts):
                if not is_deterministic(part, follow):
                    return False
                follow = union(_first(part), follow) if _may_be_empty(part) else _first(part)
            return True
        case Alternation(parts):
            firsts = [_first(part) for part in parts]
            empty = sum(map(_may_be_empty, parts))
            return (
                empty <= 1
                and _are_disjoint([*firsts, follow] if empty else firsts)
                and all(is_deterministic(part, follow) for part in parts)
            )
        case Repeat(part, least, most):
            first = _first(part)
            if _may_be_empty(part) or (least != most and intersection(first, follow)):
                return False
            return is_deterministic(part, follow if most == 1 else union(first, follow))
        case _:
            return True


def _are_disjoint(sets: list[CharacterSet]) -> bool:
    ranges = sorted(pair for each in sets for pair in each)
    return all(before[1] < after[0] for before, after in pairwise(ranges))


def _first(tree: Expression) -> CharacterSet:
    """Return the characters that a match may begin with."""
    match tree:
        case Chars(ranges):
            return ranges
        case Sequence(parts):
            found: CharacterSet = ()
            for part in parts:
                found = union(found, _first(part))
                if not _may_be_empty(part):
                    break
            return found
        case Alternation(parts):
            return union(*map(_first, parts))
        case Repeat(part):
            return _first(part)
        case Edge():
            return ()


def _may_be_empty(tree: Expression) -> bool:
    match tree:
        case Sequence(parts):
            return all(map(_may_be_empty, parts))
        case Alternation(parts):
            return any(map(_may_be_empty, parts))
        case Repeat(part, least):
            return least == 0 or _may_be_empty(part)
        case _:
            return isinstance(tree, Edge)
