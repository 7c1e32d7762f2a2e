"""Regular expressions as trees: the constructs that mean the same in every dialect, and a parser of them.

A tree stands for the texts that it matches as a whole. Constructs of one dialect alone, and constructs beyond a
finite automaton (look-arounds, references to groups), are refused by name.
"""

from __future__ import annotations

import re
from typing import TypeAlias

from attrs import define, frozen

from protocol.schemas.characters import ALL, ANY, NAMED, CharacterSet, complement, union

DEPTH_MAX = 60  # nested groups
COUNT_MAX = 100_000


@frozen
class Chars:
    """One character of a set; an empty set matches nothing at all."""

    ranges: CharacterSet


@frozen
class Edge:
    """The beginning (`^`) or the end (`$`) of a text."""

    sign: str


@frozen
class Sequence:
    """Parts one after another."""

    parts: tuple[Expression, ...]


@frozen
class Alternation:
    """One of several alternatives."""

    parts: tuple[Expression, ...]


@frozen
class Repeat:
    """A part `least` to `most` times; `most` is None if there is no limit."""

    part: Expression
    least: int
    most: int | None


Expression: TypeAlias = Chars | Edge | Sequence | Alternation | Repeat

EMPTY = Sequence(())
NOTHING = Chars(())


class BadExpression(ValueError):
    """A construct that no engine can be held to, as a sentence for the author of the regular expression."""


_COUNT = re.compile(r"\{(\d{1,9})(,?)(\d{0,9})\}")
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}
_GROUP = re.compile(r"\((?:\?(?::|P?<[A-Za-z_]\w*>))?")
_NAMED_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\([dDsSwW])")
_CLASS_HAZARD = re.compile(r"\[|&&|--|~~|\|\|")


def parse(text: str, *, loose: bool = False) -> Expression:
    """Return the tree of a regular expression; raises `BadExpression`.

    It matches what the expression matches in every dialect; or, if it is loose, in any dialect.
    """
    parser = _Parser(text, loose)
    tree = parser.choice(0)
    if parser.at < len(text):
        raise BadExpression("a parenthesis is closed that was not opened; write \\)")
    return tree


@define
class _Parser:
    text: str
    loose: bool
    at: int = 0

    def choice(self, depth: int) -> Expression:
        """Read alternatives up to a closing parenthesis or the end."""
        if depth > DEPTH_MAX:
            raise BadExpression(f"groups are nested more than {DEPTH_MAX} deep")
        parts = [self._sequence(depth)]
        while self._peek() == "|":
            self.at += 1
            parts.append(self._sequence(depth))
        return parts[0] if len(parts) == 1 else Alternation(tuple(parts))

    def _peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def _sequence(self, depth: int) -> Expression:
        parts: list[Expression] = []
        while self._peek() not in {"", "|", ")"}:
            parts.append(self._repeated(self._atom(depth)))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _repeated(self, part: Expression) -> Expression:
        sign = self._peek()
        if sign in {"*", "+", "?"}:
            self.at += 1
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
        elif sign == "{":
            if (count := _COUNT.match(self.text, self.at)) is None:
                raise BadExpression("a brace that begins no count such as {2,5} differs between dialects; write \\{")
            self.at = count.end()
            least = int(count[1])
            most = least if not count[2] else int(count[3]) if count[3] else None
            if max(least, most or 0) > COUNT_MAX or (most is not None and most < least):
                raise BadExpression(f"a count must be ascending and at most {COUNT_MAX:,}")
        else:
            return part
        if isinstance(part, Edge):
            raise BadExpression("an anchor cannot be repeated")
        if self._peek() == "?":  # a lazy count matches the same texts
            self.at += 1
        if self._peek() in {"*", "+", "?", "{"}:
            raise BadExpression("a count of a count differs between dialects; put the inner one in a group")
        return Repeat(part, least, most)

    def _atom(self, depth: int) -> Expression:
        sign = self._peek()
        if sign == "(":
            return self._group(depth)
        if sign == "[":
            return Chars(self._class())
        self.at += 1
        match sign:
            case "\\":
                return Chars(self._escape(in_class=False)[self.loose])
            case ".":
                return Chars(ALL if self.loose else ANY)
            case "^" | "$":
                return Edge(sign)
            case "*" | "+" | "?" | "{":
                raise BadExpression(f"nothing stands before the count {sign}; write \\{sign} for the character")
            case _:
                return Chars(((ord(sign), ord(sign)),))

    def _group(self, depth: int) -> Expression:
        opened = _GROUP.match(self.text, self.at)
        assert opened is not None
        if opened[0] == "(" and self.text.startswith("(?", self.at):
            found = self.text[self.at : self.at + 4]
            kind = "a look-around" if re.match(r"\(\?<?[=!]", found) else "a group with a flag or a condition"
            raise BadExpression(f"{kind} ({found.rstrip()}...) cannot be enforced; say it without")
        self.at = opened.end()
        inner = self.choice(depth + 1)
        if self._peek() != ")":
            raise BadExpression("a parenthesis is not closed")
        self.at += 1
        return inner

    def _escape(self, *, in_class: bool) -> tuple[CharacterSet, CharacterSet]:
        """Read what follows a backslash: the characters in every dialect, and in any."""
        letter = self._peek()
        self.at += 1
        if letter in NAMED:
            return NAMED[letter]
        if letter in _CONTROLS and not (letter == "0" and self._peek().isdecimal()):
            code = ord(_CONTROLS[letter])
        elif letter in {"x", "u"}:
            code = self._code(2 if letter == "x" else 4)
        elif letter == "b" and in_class:
            code = 8
        elif letter in {"b", "B"}:
            raise BadExpression(f"a boundary of words (\\{letter}) cannot be enforced; say it without")
        elif letter.isdecimal() or letter == "k":
            raise BadExpression(f"a reference to a group (\\{letter}) cannot be enforced; say it without")
        elif letter == "" or letter.isalnum() or letter > "\x7f":
            raise BadExpression(f"the escape \\{letter} differs between dialects; write the characters themselves")
        else:
            code = ord(letter)
        return ((code, code),), ((code, code),)

    def _code(self, digits: int) -> int:
        written = self.text[self.at : self.at + digits]
        if not re.fullmatch(rf"[0-9A-Fa-f]{{{digits}}}", written):
            raise BadExpression(f"\\x needs two and \\u needs four hexadecimal digits, and here is {written!r}")
        self.at += digits
        code = int(written, 16)
        low = re.compile(r"\\u([dD][c-fC-F][0-9A-Fa-f]{2})").match(self.text, self.at)
        if 0xD800 <= code < 0xDC00 and low is not None:
            self.at = low.end()
            return 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        if 0xD800 <= code < 0xE000:
            raise BadExpression(f"\\u{written} is half of a character; write both halves")
        return code

    def _class(self) -> CharacterSet:
        """Read a class of characters, from its opening bracket on."""
        self.at += 1
        if negated := self._peek() == "^":
            self.at += 1
        if self._peek() == "]":
            raise BadExpression("a class that begins with ] differs between dialects; write \\]")
        begin = self.at
        least: list[CharacterSet] = []
        most: list[CharacterSet] = []
        while (sign := self._peek()) != "]":
            if not sign:
                raise BadExpression("a class of characters is not closed")
            if _CLASS_HAZARD.match(self.text, self.at):
                raise BadExpression(f"{sign} in a class differs between dialects; write \\{sign}")
            low = self._member()
            if self._peek() == "-" and self.text[self.at + 1 : self.at + 2] not in {"]", ""}:
                self.at += 1
                low = (_range(low[0], self._member()[0]),) * 2
            least.append(low[0])
            most.append(low[1])
        self.at += 1
        escapes = set(_NAMED_ESCAPE.findall(self.text[begin : self.at]))
        if any({letter, letter.upper()} <= escapes for letter in "dsw"):
            least = most = [ALL]
        if negated:
            return complement(union(*(least if self.loose else most)))
        return union(*(most if self.loose else least))

    def _member(self) -> tuple[CharacterSet, CharacterSet]:
        sign = self._peek()
        self.at += 1
        if sign == "\\":
            return self._escape(in_class=True)
        return (((ord(sign), ord(sign)),),) * 2


def _range(first: CharacterSet, last: CharacterSet) -> CharacterSet:
    """Return the characters from one to another."""
    if len(first) != 1 or len(last) != 1 or first[0][0] != first[0][1] or last[0][0] != last[0][1]:
        raise BadExpression("a range in a class must have a character at each end; write \\- for the hyphen")
    if last[0][0] < first[0][0]:
        raise BadExpression("a range in a class must be ascending")
    return ((first[0][0], last[0][0]),)
