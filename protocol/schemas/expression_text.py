"""The text of a regular expression for an engine's grammar backend (xgrammar 0.2.7).

The backend reads the pattern of a JSON string as the text between its quotation marks, escapes included, and has two
ways to do so. A pattern in ASCII is a finite automaton, which is fast for few states and wrong for expressions that are
not deterministic. A pattern with any other character becomes rules of a grammar, which is fast for many repetitions of
one class. Ranges are split where the number of bytes or the first byte of a character changes: the backend accepts
malformed UTF-8 otherwise, or comes to a byte that nothing may follow.
"""

from __future__ import annotations

from bisect import bisect_right

from protocol.schemas.characters import ALL, JSON_PLAIN, CharacterSet, intersection
from protocol.schemas.determinism import is_deterministic
from protocol.schemas.expressions import EMPTY, Alternation, Chars, Edge, Expression, Repeat, Sequence
from protocol.schemas.repetition import written_out

STATES_MAX = 100  # characters of an automaton
COUNT_MAX = 100  # of one repetition with a lower bound
NOT_ASCII = "é{0}"  # matches nothing but the empty text
_SPLITS = (0x80, 0x800, 0x1000, 0xD000, 0xE000, 0x10000, 0x40000, 0x100000)
_SIGNS = frozenset("\\^$.*+?()[]{}|")
_SIGNS_IN_CLASS = frozenset("\\^[]-")
_JSON_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}


def in_json(tree: Expression) -> str:
    """Return the pattern of the JSON strings whose value an expression matches as a whole; raises `BadExpression`."""
    automaton = _states(tree) <= STATES_MAX and is_deterministic(tree) and not _has_escapes(tree)
    text = _text(tree if automaton else written_out(tree), json=True, ascii_only=automaton)
    return text if automaton or not text.isascii() else f"(?:{text}){NOT_ASCII}"


def in_text(tree: Expression) -> str:
    """Return the regular expression of the texts that an expression matches as a whole; raises `BadExpression`."""
    return _text(written_out(tree), json=False, ascii_only=True)


def _text(tree: Expression, *, json: bool, ascii_only: bool) -> str:
    def text(part: Expression) -> str:
        match part:
            case Chars(ranges):
                return _chars(intersection(ranges, ALL), json=json, ascii_only=ascii_only)
            case Edge(sign):
                return sign
            case Sequence(parts):
                return "".join(map(grouped, parts))
            case Alternation(parts):
                return "|".join("" if part == EMPTY else grouped(part) for part in parts)
            case Repeat(inner, least, most):
                return _repeated(text(inner) if single(inner) else f"(?:{text(inner)})", least, most)

    def grouped(part: Expression) -> str:
        return f"(?:{text(part)})" if isinstance(part, Alternation) or part == EMPTY else text(part)

    def single(part: Expression) -> bool:
        return isinstance(part, Chars) and not (json and not intersection(part.ranges, JSON_PLAIN))

    return text(tree)


def _repeated(text: str, least: int, most: int | None) -> str:
    """Return a text so many times; a count with a lower bound and a large upper one is written as several.

    For such a count the backend allows a token that goes on behind the repetition, such as a last character with a
    quotation mark, before the lower bound is reached, and then refuses it.
    """
    if least == 0 or (least <= COUNT_MAX if most is None else most <= COUNT_MAX):
        return text + _count(least, most)
    whole, more = divmod(least, COUNT_MAX)
    parts = [f"{{{COUNT_MAX}}}"] * whole + ([f"{{{more}}}"] if more else [])
    if most != least:
        parts.append(_count(0, None if most is None else most - least))
    return "".join(text + part for part in parts)


def _count(least: int, most: int | None) -> str:
    if most is None and least < 2:
        return "+" if least else "*"
    return f"{{{least}}}" if least == most else f"{{{least},{'' if most is None else most}}}"


def _chars(ranges: CharacterSet, *, json: bool, ascii_only: bool) -> str:
    if json and not (plain := intersection(ranges, JSON_PLAIN)):
        written = [_json_escape(code) for low, high in ranges for code in range(low, high + 1)]
        return f"(?:{'|'.join(written)})" if len(written) > 1 else written[0]
    if json:
        ranges = plain
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _character(ranges[0][0], signs=_SIGNS, ascii_only=ascii_only)
    # An automaton's adjacent ranges become one again, so every second piece is in another class.
    classes: dict[int, list[str]] = {}
    for low, high in ranges:
        for begin, end in _split(low, high):
            ends = [_character(code, signs=_SIGNS_IN_CLASS, ascii_only=ascii_only) for code in (begin, end)]
            index = bisect_right(_SPLITS, begin)
            own_class = index % 2 if json and ascii_only else 0
            classes.setdefault(own_class, []).append(ends[0] if begin == end else "-".join(ends))
    written = [f"[{''.join(pieces)}]" for pieces in classes.values()]
    return written[0] if len(written) == 1 else f"(?:{'|'.join(written)})"


def _split(low: int, high: int) -> list[tuple[int, int]]:
    begins = [low, *(split for split in _SPLITS if low < split <= high)]
    return list(zip(begins, [*(begin - 1 for begin in begins[1:]), high], strict=True))


def _character(code: int, *, signs: frozenset[str], ascii_only: bool) -> str:
    character = chr(code)
    if character in signs:
        return f"\\{character}"
    if 0x20 <= code < 0x7F or (code >= 0xA0 and not ascii_only):
        return character
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\u{{{code:x}}}"


def _json_escape(code: int) -> str:
    written = _JSON_ESCAPES.get(chr(code), f"\\u{code:04x}")
    return written.replace("\\", "\\\\")


def _states(tree: Expression) -> int:
    """Return the number of characters of an expression with every count written out."""
    match tree:
        case Sequence(parts) | Alternation(parts):
            return sum(map(_states, parts))
        case Repeat(part, least, most):
            return _states(part) * max(1, least, most or 0)
        case _:
            return 1


def _has_escapes(tree: Expression) -> bool:
    """Return whether a part of an expression matches only characters that JSON strings have as escapes."""
    match tree:
        case Sequence(parts) | Alternation(parts):
            return any(map(_has_escapes, parts))
        case Repeat(part):
            return _has_escapes(part)
        case Chars(ranges):
            return not intersection(ranges, JSON_PLAIN)
        case _:
            return False
