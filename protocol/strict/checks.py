"""Conditions added to a type by `Annotated`: bounds, lengths and patterns."""

from __future__ import annotations

import re
from collections.abc import Collection

from attrs import frozen

from protocol.strict.mistakes import describe


@frozen
class Within:
    """Bounds of a number; `above` itself is excluded."""

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None

    def mistake(self, value: object) -> str | None:
        """Return the bounds that a number breaks."""
        assert isinstance(value, int | float)
        inside = (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
        )
        if inside:
            return None
        bounds = (("at least", self.at_least), ("above", self.above), ("at most", self.at_most))
        words = " and ".join(f"{word} {bound}" for word, bound in bounds if bound is not None)
        return f"must be {words}, got {describe(value).removesuffix('.0')}"


@frozen
class Holds:
    """Bounds of the length of a string (characters), a list or an object (items)."""

    at_least: int = 0
    at_most: int | None = None

    def mistake(self, value: object) -> str | None:
        """Return the bound that a length breaks."""
        assert isinstance(value, str | list | tuple | dict)
        what = "characters" if isinstance(value, str) else "items"
        if len(value) < self.at_least:
            return "must not be empty" if self.at_least == 1 else f"must hold at least {self.at_least} {what}"
        if self.at_most is not None and len(value) > self.at_most:
            return f"must hold at most {self.at_most} {what}, holds {len(value)}"
        return None


@frozen
class OneOf:
    """The allowed strings of a value, if they are computed; a `Literal` names constant ones."""

    allowed: Collection[str]

    def mistake(self, value: object) -> str | None:
        """Return the allowed strings unless a string is one of them."""
        return None if value in self.allowed else f"must be {' or '.join(self.allowed)}, got {describe(value)}"


@frozen
class Matches:
    """A pattern that a whole string must match, and the words for it in a sentence."""

    pattern: str
    words: str

    def mistake(self, value: object) -> str | None:
        """Return the words for the pattern if a string does not match it."""
        assert isinstance(value, str)
        return None if re.fullmatch(self.pattern, value) else f"must be {self.words}, got {describe(value)}"
