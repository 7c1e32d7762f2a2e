"""Regular expressions of clients: the constructs that no engine can be held to."""

from __future__ import annotations

import re

_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\Z)|\(\?(?:<?[=!])?|.", re.DOTALL)
_REFUSED = {
    **dict.fromkeys(("(?=", "(?!", "(?<=", "(?<!"), "a look-around"),
    **dict.fromkeys((r"\b", r"\B"), "a boundary of words"),
    **dict.fromkeys((rf"\{number}" for number in range(1, 10)), "a reference to a group"),
    r"\k": "a reference to a group",
}


def refused_construct(pattern: str) -> str | None:
    """Return the first construct that no engine can be held to as a sentence for its author, None if there is none."""
    for token in _TOKEN.finditer(pattern):
        if (name := _REFUSED.get(token[0])) is not None:
            return f"{name} ({token[0]}) cannot be enforced; say it without"
        inner = (token[0] == "^" and token.start() > 0) or (token[0] == "$" and token.end() < len(pattern))
        if inner:
            return f"an anchor ({token[0]}) inside of a pattern cannot be enforced; say it without"
    return None
