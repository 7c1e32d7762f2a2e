"""The error of a schema or of a regular expression that no engine can be held to."""

from __future__ import annotations


class Unenforceable(ValueError):
    """No engine can be held to a keyword; `str(error)` names its place, the keyword, and the remedy.

    `pointer` is a JSON pointer to the schema that has the keyword, as a fragment (`#/properties/a`).
    """

    def __init__(self, pointer: str, keyword: str, reason: str) -> None:
        super().__init__(f"{pointer}: {keyword}: {reason}")
        self.pointer = pointer
        self.keyword = keyword
        self.reason = reason


def pointer_below(pointer: str, *tokens: str | int) -> str:
    """Return the JSON pointer of a place below another."""
    escaped = (str(token).replace("~", "~0").replace("/", "~1") for token in tokens)
    return "/".join((pointer, *escaped))
