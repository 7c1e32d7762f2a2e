"""Line numbers of the keys of a TOML text, since the standard library's parser reports none."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping

from attrs import define, field

from protocol.strict.mistakes import join, segment

BLANK = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
SPACE = re.compile(r"[ \t]*")
BARE = re.compile(r"[A-Za-z0-9_-]+")
QUOTED = {  # each kind of string up to its end; longer quotes first
    '"""': re.compile(r'"""(?:[^\\"]|\\.|"(?!""))*"{3,5}', re.DOTALL),
    "'''": re.compile(r"'''(?:[^']|'(?!''))*'{3,5}", re.DOTALL),
    '"': re.compile(r'"(?:[^\\"\n]|\\.)*"'),
    "'": re.compile(r"'[^'\n]*'"),
}
PLAIN = re.compile(r"[^,\]}#\n]*")  # a number, a boolean or a time
ESCAPE = re.compile(r'\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[btnfre"\\])')
SHORT_ESCAPES = {"b": "\b", "t": "\t", "n": "\n", "f": "\f", "r": "\r", "e": "\x1b", '"': '"', "\\": "\\"}


def lines_of(text: str) -> dict[str, int]:
    """Return the line of every key, table and list item of a valid TOML text, by its path as in a `Mistake`.

    A table without a header of its own has the line of the first key in it.
    """
    scanner = _Scanner(text)
    scanner.scan()
    return scanner.lines


def line_of(path: str, lines: Mapping[str, int]) -> int:
    """Return the line of a path, or of the innermost table or list around it; 1 if there is none."""
    if path in lines:
        return lines[path]
    ends = [number for number, character in enumerate(path) if character in ".["]
    return next((lines[path[:end]] for end in reversed(ends) if path[:end] in lines), 1)


@define(eq=False)
class _Scanner:
    """A scanner of a text accepted by `tomllib`, so without checks of its own."""

    text: str
    lines: dict[str, int] = field(factory=dict)
    _position: int = 0
    _starts: list[int] = field(factory=list)  # the offsets of the lines
    _sizes: dict[str, int] = field(factory=dict)  # the sizes of arrays of tables, by path

    def __attrs_post_init__(self) -> None:
        self._starts = [0, *(match.end() for match in re.finditer("\n", self.text))]

    def scan(self) -> None:
        table = ""
        while self._skip(BLANK) < len(self.text):
            start = self._position
            if self.text.startswith("[[", start):
                self._position += 2
                path = self._record("", self._key(), start)
                self._sizes[path] = self._sizes.get(path, 0) + 1
                table = self._last(path)
                self.lines[table] = self._line(start)
                self._position = self.text.index("]]", self._position) + 2
            elif self.text[start] == "[":
                self._position += 1
                keys = self._key()
                table = self._record("", keys, start, exact=True)
                self._position = self.text.index("]", self._position) + 1
            else:
                self._pair(table)

    def _pair(self, table: str) -> None:
        start = self._position
        path = self._record(table, self._key(), start, exact=True)
        self._position = self.text.index("=", self._position) + 1
        self._value(path)

    def _value(self, path: str) -> None:
        self._skip(SPACE)
        opening = self.text[self._position : self._position + 3]
        for quote, pattern in QUOTED.items():
            if opening.startswith(quote):
                self._skip(pattern)
                return
        if opening.startswith("["):
            self._items(path)
        elif opening.startswith("{"):
            self._position += 1
            while self.text[self._skip(BLANK)] != "}":
                self._pair(path)
                self._separator()
            self._position += 1
        else:
            self._skip(PLAIN)

    def _items(self, path: str) -> None:
        self._position += 1
        number = 0
        while self.text[self._skip(BLANK)] != "]":
            item = f"{path}[{number}]"
            self.lines.setdefault(item, self._line(self._position))
            self._value(item)
            self._separator()
            number += 1
        self._position += 1

    def _separator(self) -> None:
        if self.text[self._skip(BLANK)] == ",":
            self._position += 1

    def _key(self) -> list[str]:
        """Return the parts of a dotted key, and advance past it."""
        parts: list[str] = []
        while True:
            self._skip(SPACE)
            parts.append(self._part())
            self._skip(SPACE)
            if not self.text.startswith(".", self._position):
                return parts
            self._position += 1

    def _part(self) -> str:
        begin = self._position
        if (quote := self.text[begin]) in "\"'":
            self._skip(QUOTED[quote])
            inner = self.text[begin + 1 : self._position - 1]
            return ESCAPE.sub(_unescaped, inner) if quote == '"' else inner
        self._skip(BARE)
        return self.text[begin : self._position]

    def _record(self, path: str, keys: list[str], start: int, *, exact: bool = False) -> str:
        """Record a line for the path of a key and for its implied tables; return the path."""
        line = self._line(start)
        for inner in self._paths(path, keys):
            self.lines.setdefault(inner, line)
            path = inner
        if exact:
            self.lines[path] = line
        return path

    def _paths(self, path: str, keys: list[str]) -> Iterator[str]:
        for key in keys:
            path = join(self._last(path), segment(key))
            yield path

    def _last(self, path: str) -> str:
        """Return the path of a table; for an array of tables, of its last one so far."""
        return f"{path}[{self._sizes[path] - 1}]" if path in self._sizes else path

    def _skip(self, pattern: re.Pattern[str]) -> int:
        match = pattern.match(self.text, self._position)
        self._position = self._position if match is None else match.end()
        return self._position

    def _line(self, start: int) -> int:
        return bisect_right(self._starts, start)


def _unescaped(match: re.Match[str]) -> str:
    code = match[1]
    return SHORT_ESCAPES[code] if code in SHORT_ESCAPES else chr(int(code[1:], 16))
