"""Text of others, made safe to show: in a log, in a terminal, in an error sentence."""

from __future__ import annotations

TEXT_LENGTH_MAX = 2000


def printable(text: str) -> str:
    """Return text on one line, cut to `TEXT_LENGTH_MAX`, with all control characters escaped."""
    cut = text if len(text) <= TEXT_LENGTH_MAX else f"{text[:TEXT_LENGTH_MAX]}..."
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in cut)
