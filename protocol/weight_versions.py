"""The versions of the weights that compute an answer, and which of its tokens each of them has computed.

An engine announces the version at the beginning of an answer, and again before the first token of another version. So
the versions of every token are known as soon as the token is, also of an answer that is left before its result.
"""

from __future__ import annotations

from typing import TypeAlias

from attrs import define, field

WeightVersions: TypeAlias = tuple[tuple[str, int], ...]
"""Versions in order, each with its number of tokens; an empty version is not known."""

FIRST_VERSION = "default"
"""The version of an engine's configured weights, unless they were named."""

VERSIONS_MAX, VERSION_CHARACTERS_MAX = 64, 128


@define(eq=False)
class VersionRecord:
    """The versions announced of one answer, each with the number of tokens before it."""

    _announced: list[tuple[str, int]] = field(factory=list)

    @property
    def last(self) -> str:
        """The version of the next token; empty while none is known."""
        return self._announced[-1][0] if self._announced else ""

    def announce(self, version: str, tokens: int) -> None:
        """Note that every token behind the first `tokens` is of this version."""
        while self._announced and self._announced[-1][1] >= tokens:
            self._announced.pop()
        if version != self.last:
            self._announced.append((version, tokens))

    def spans(self, tokens: int) -> WeightVersions:
        """Return the versions of the first `tokens`, the last `VERSIONS_MAX` at most; none if no version is known."""
        spans: list[tuple[str, int]] = []
        end = tokens
        for version, begin in reversed(self._announced):
            if begin < end:
                spans.append((version, end - begin))
                end = begin
        if end and spans:
            spans.append(("", end))
        return tuple(reversed(spans[:VERSIONS_MAX]))
