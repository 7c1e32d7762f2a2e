"""Sets of characters as sorted ranges of code points, and the sets that regular expressions have names for.

Dialects of regular expressions differ on which characters beyond ASCII are digits, letters or spaces. Each named set
therefore has two bounds: its characters in every dialect, and its characters in at least one.
"""

from __future__ import annotations

from typing import TypeAlias

CharacterSet: TypeAlias = tuple[tuple[int, int], ...]
"""Ranges of code points in ascending order, both ends included; adjacent ranges are one."""

SURROGATES = (0xD800, 0xDFFF)
LAST = 0x10FFFF


def union(*sets: CharacterSet) -> CharacterSet:
    """Return the characters that are in any of the sets."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(pair for ranges in sets for pair in ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    return tuple(merged)


def complement(ranges: CharacterSet) -> CharacterSet:
    """Return the characters that are not in a set; surrogates are no characters."""
    gaps, begin = list[tuple[int, int]](), 0
    for low, high in union(ranges, (SURROGATES,)):
        if begin < low:
            gaps.append((begin, low - 1))
        begin = high + 1
    if begin <= LAST:
        gaps.append((begin, LAST))
    return tuple(gaps)


def intersection(first: CharacterSet, second: CharacterSet) -> CharacterSet:
    """Return the characters that are in both sets."""
    return complement(union(complement(first), complement(second)))


def characters(text: str) -> CharacterSet:
    """Return the set of the characters of a text."""
    return union(tuple((ord(character), ord(character)) for character in text))


ALL = complement(())
_BEYOND_ASCII = complement(((0, 0x7F),))
_DIGITS = ((0x30, 0x39),)
_WORD = union(_DIGITS, ((0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)))
_SPACES = characters("\t\n\v\f\r ")
_OTHER_SPACES = union(
    characters("\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff"), ((0x2000, 0x200A),)
)

NAMED = {  # the letter of the escape: in every dialect, in any dialect
    "d": (_DIGITS, union(_DIGITS, _BEYOND_ASCII)),
    "w": (_WORD, union(_WORD, _BEYOND_ASCII)),
    "s": (_SPACES, union(_SPACES, _OTHER_SPACES)),
}
NAMED |= {letter.upper(): (complement(most), complement(least)) for letter, (least, most) in NAMED.items()}

ANY = complement(characters("\n\r\u2028\u2029"))  # what a full stop means
JSON_PLAIN = complement(union(((0, 0x1F),), characters('"\\')))  # what a JSON string has without an escape
