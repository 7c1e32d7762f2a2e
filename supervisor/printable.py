"""Text from clients, files and other nodes, made safe for a log, a terminal or an error message."""

from __future__ import annotations

TEXT_LENGTH_MAX = 2000


def printable(text: str) -> str:
    """Return text on one line, cut to `TEXT_LENGTH_MAX`, with all control characters escaped."""
    return escaped(text if len(text) <= TEXT_LENGTH_MAX else f"{text[:TEXT_LENGTH_MAX]}...")


def escaped(text: str) -> str:
    """Return text on one line, with all control characters escaped."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
