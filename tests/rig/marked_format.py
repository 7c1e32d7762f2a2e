"""The format `marked` of the tests: reasoning in `[think]...[/think]`, calls in `[call NAME]...[/call]`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from attrs import define, field

from actors.text.formats.stage import CallPiece, Piece, ReasoningPiece, TextPiece

BEGINNING = re.compile(r"\[(?:/?(?:t(?:h(?:i(?:nk?)?)?)?|c(?:a(?:ll?)?)?)?|call [a-z_]{0,32})")
MARKER = re.compile(r"\[(?:(/?)think|(/)call|call ([a-z_]{1,32}))\]")
BRACKET = frozenset("[")


@define(eq=False)
class Marked:
    """The stage of one choice."""

    _buffer: str = ""
    _reasons: bool = False
    _calls: int = 0
    _in_call: bool = False
    fed: list[str] = field(factory=list)  # every text that has not skipped the stage

    @property
    def held(self) -> int:
        """The characters that may begin a marker."""
        return len(self._buffer)

    @property
    def watched(self) -> frozenset[str] | None:
        """The first character of every marker, while the answer itself comes."""
        return None if self._reasons or self._in_call else BRACKET

    @property
    def thought_end(self) -> str | None:
        """The marker behind reasoning."""
        return "[/think]" if self._reasons else None

    def feed(self, text: str) -> Sequence[Piece]:
        """Take the next text; return the pieces that are certain now."""
        self.fed.append(text)
        self._buffer += text
        pieces: list[Piece] = []
        while self._buffer:
            begin = self._buffer.find("[")
            pieces += self._pieces(len(self._buffer) if begin < 0 else begin)
            if (marker := MARKER.match(self._buffer)) is not None:
                self._buffer = self._buffer[marker.end() :]
                pieces += self._switch(marker)
            elif BEGINNING.fullmatch(self._buffer) is not None:
                break
            else:
                pieces += self._pieces(min(1, len(self._buffer)))
        return pieces

    def end(self, *, cut: bool = False) -> Sequence[Piece]:
        """Return what may have become a marker, and has not."""
        return self._pieces(len(self._buffer))

    def _switch(self, marker: re.Match[str]) -> Sequence[Piece]:
        if (name := marker[3]) is not None:
            self._reasons, self._in_call, self._calls = False, True, self._calls + 1
            return (CallPiece(self._calls - 1, name),)
        self._in_call = False
        self._reasons = marker[2] is None and not marker[1]
        return ()

    def _pieces(self, size: int) -> list[Piece]:
        text, self._buffer = self._buffer[:size], self._buffer[size:]
        if not text:
            return []
        if self._in_call:
            return [CallPiece(self._calls - 1, arguments=text)]
        return [ReasoningPiece(text) if self._reasons else TextPiece(text)]
