"""Line numbers of the keys of a TOML text, which the standard library's reader does not tell."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping

from attrs import define, field

from protocol.strict.mistakes import join, segment

BLANK = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
SPACE = re.compile(r"[ \t]*")
BARE = re.compile(r"[A-Za-z0-9_-]+")
QUOTED = {  # how each kind of string goes on to its end; the longer opening first
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

    A table that stands nowhere by itself has the line of the first key in it.
    """
    scanner = _Scanner(text)
    scanner.scan()
    return scanner.lines


def line_of(path: str, lines: Mapping[str, int]) -> int:
    """Return the line of a path, or of the innermost table or list around it; 1 if there is none."""
    around = [known for known in lines if path == known or path.startswith((f"{known}.", f"{known}["))]
    return lines[max(around, key=len)] if around else 1


@define(eq=False)
class _Scanner:
    """Walks a text that `tomllib` has accepted, so that nothing in it needs to be checked again."""

    text: str
    lines: dict[str, int] = field(factory=dict)
    _at: int = 0
    _starts: list[int] = field(factory=list)  # of each line
    _sizes: dict[str, int] = field(factory=dict)  # of each array of tables, by its path

    def __attrs_post_init__(self) -> None:
        self._starts = [0, *(found.end() for found in re.finditer("\n", self.text))]

    def scan(self) -> None:
        table = ""
        while self._skip(BLANK) < len(self.text):
            at = self._at
            if self.text.startswith("[[", at):
                self._at += 2
                path = self._note_all("", self._key(), at)
                self._sizes[path] = self._sizes.get(path, 0) + 1
                table = self._last(path)
                self.lines[table] = self._line(at)
                self._at = self.text.index("]]", self._at) + 2
            elif self.text[at] == "[":
                self._at += 1
                keys = self._key()
                table = self._note_all("", keys, at, exact=True)
                self._at = self.text.index("]", self._at) + 1
            else:
                self._pair(table)

    def _pair(self, table: str) -> None:
        at = self._at
        path = self._note_all(table, self._key(), at, exact=True)
        self._at = self.text.index("=", self._at) + 1
        self._value(path)

    def _value(self, path: str) -> None:
        self._skip(SPACE)
        opening = self.text[self._at : self._at + 3]
        for quote, pattern in QUOTED.items():
            if opening.startswith(quote):
                self._skip(pattern)
                return
        if opening.startswith("["):
            self._items(path)
        elif opening.startswith("{"):
            self._at += 1
            while self.text[self._skip(BLANK)] != "}":
                self._pair(path)
                self._separator()
            self._at += 1
        else:
            self._skip(PLAIN)

    def _items(self, path: str) -> None:
        self._at += 1
        number = 0
        while self.text[self._skip(BLANK)] != "]":
            item = f"{path}[{number}]"
            self.lines.setdefault(item, self._line(self._at))
            self._value(item)
            self._separator()
            number += 1
        self._at += 1

    def _separator(self) -> None:
        if self.text[self._skip(BLANK)] == ",":
            self._at += 1

    def _key(self) -> list[str]:
        """Return the parts of a dotted key, and stand behind it."""
        parts: list[str] = []
        while True:
            self._skip(SPACE)
            parts.append(self._part())
            self._skip(SPACE)
            if not self.text.startswith(".", self._at):
                return parts
            self._at += 1

    def _part(self) -> str:
        begin = self._at
        if (quote := self.text[begin]) in "\"'":
            self._skip(QUOTED[quote])
            inner = self.text[begin + 1 : self._at - 1]
            return ESCAPE.sub(_unescaped, inner) if quote == '"' else inner
        self._skip(BARE)
        return self.text[begin : self._at]

    def _note_all(self, path: str, keys: list[str], at: int, *, exact: bool = False) -> str:
        """Note a line for a path and for what is implied on the way to it, and return the path."""
        line = self._line(at)
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
        """Return the path of a table, which of an array of tables is its last one so far."""
        return f"{path}[{self._sizes[path] - 1}]" if path in self._sizes else path

    def _skip(self, pattern: re.Pattern[str]) -> int:
        found = pattern.match(self.text, self._at)
        self._at = self._at if found is None else found.end()
        return self._at

    def _line(self, at: int) -> int:
        return bisect_right(self._starts, at)


def _unescaped(found: re.Match[str]) -> str:
    code = found[1]
    return SHORT_ESCAPES[code] if code in SHORT_ESCAPES else chr(int(code[1:], 16))
