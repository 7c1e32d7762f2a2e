"""Search for a regular expression in a text, in a bounded number of steps.

A client's expression may make a search that backtracks take for ever. This one follows all ways at once, as a set of
places in the text.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Set as AbstractSet

from attrs import define

from protocol.schemas.characters import CharacterSet
from protocol.schemas.expressions import Alternation, BadExpression, Chars, Edge, Expression, Repeat, Sequence

STEPS_MAX = 200_000


def is_found(tree: Expression, text: str) -> bool:
    """Return whether an expression, with its anchors, is found anywhere in a text; raises `BadExpression`."""
    return bool(_Search(text).ends(tree, set(range(len(text) + 1))))


@define
class _Search:
    text: str
    steps: int = 0

    def ends(self, tree: Expression, starts: AbstractSet[int]) -> AbstractSet[int]:
        """Return the places where a match may end that begins at one of some places."""
        self.steps += 1 + len(starts)
        if self.steps > STEPS_MAX:
            raise BadExpression("it takes too many steps to compare with the names and values of the schema")
        match tree:
            case Chars(ranges):
                return {start + 1 for start in starts if start < len(self.text) and _has(ranges, self.text[start])}
            case Edge(sign):
                return starts & {0 if sign == "^" else len(self.text)}
            case Sequence(parts):
                for part in parts:
                    starts = self.ends(part, starts)
                return starts
            case Alternation(parts):
                return set[int]().union(*(self.ends(part, starts) for part in parts))
            case Repeat():
                return self._repeated(tree, starts)

    def _repeated(self, tree: Repeat, starts: AbstractSet[int]) -> AbstractSet[int]:
        for _ in range(tree.least):
            after = self.ends(tree.part, starts)
            if after == starts:
                break
            starts = after
        reached, times = starts, tree.least
        while starts and times != tree.most:
            starts = self.ends(tree.part, starts) - reached
            reached = reached | starts
            times += 1
        return reached


def _has(ranges: CharacterSet, character: str) -> bool:
    index = bisect_right(ranges, (ord(character), 0x110000)) - 1
    return index >= 0 and ord(character) <= ranges[index][1]
