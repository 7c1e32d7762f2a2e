"""Values that stand between markers as they are.

A marker may be a part of a value, too: what follows an end marker shows whether it is one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from actors.text.formats.json_text import SPACE, json_value
from actors.text.formats.source import NoCall, Reading, Source

T = TypeVar("T")

NAME_CHARACTERS_MAX = 256  # of an argument


def raw_value(
    source: Source, ends: tuple[str, ...], follow: Callable[[str, str], Reading[T]], *, json: bool
) -> Reading[tuple[str, T]]:
    """Take a value and what follows it, and return both; raises `NoCall` if it has no end.

    `follow` reads what stands behind an end, given the end and the character before it. It raises `NoCall` if the end,
    with all text taken by `follow`, belongs to the value. It takes no end itself, so that the next one is found.
    """
    begin = source.mark
    if json:
        # JSON's own syntax knows which markers belong to it. Ends are looked for behind it, or behind what is none.
        with suppress(NoCall):
            yield from json_value(source)
            yield from source.run(SPACE)
    while True:
        text, end = yield from source.until(*ends)
        if end is None:
            raise NoCall
        behind = source.mark - 1
        with suppress(NoCall):
            following = yield from follow(end, text[-1:])
            return source.between(begin, behind), following


def at_end(source: Source) -> Reading[bool]:
    """Return whether the answer ends here by itself."""
    return not (yield from source.peek()) and not source.cut
