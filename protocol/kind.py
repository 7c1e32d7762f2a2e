"""Messages and their rows: what may cross a link, under which number, and what may answer it.

Every message between nodes is one row `Kind(number, message, replies, result)`, below the class that it describes: in
`messages` (what engines are asked), `text_messages` (processors) or `cluster` (nodes). The codec reads nothing else, so
a message without a row cannot be encoded, and a reply that no row allows is refused where it arrives. A number, once
given, is never given to another message: two versions of the program may be linked while one replaces the other.
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen


class Message:
    """Base of every message; to cross a link it needs a row as well."""

    __slots__ = ()


@frozen
class Kind:
    """One message between nodes: its number on the wire, and what answers it if it is a request.

    A request is answered by any number of `replies`, in whatever order, and one `result`. None: it is no request.
    """

    number: int
    message: type[Message]
    replies: tuple[type[Message], ...] = ()
    result: type[Message] | None = None


def by_message(kinds: Iterable[Kind]) -> dict[type[Message], Kind]:
    """Return the rows by their messages, in the order of their numbers; raises `ValueError` if two share either."""
    rows = sorted(kinds, key=lambda row: row.number)
    table = {row.message: row for row in rows}
    if len(table) < len(rows) or len({row.number for row in rows}) < len(rows):
        raise ValueError("two kinds of message have the same number, or two numbers the same message")
    return table
