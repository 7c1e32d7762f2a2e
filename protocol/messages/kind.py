"""The table of messages between nodes, with their numbers and their legal answers.

Every message between nodes has one row `Kind(number, message, replies, result)`, at the end of the file of its class:
`generation` (requests to engines), `text` (to processors) or `cluster` (to nodes). The codec reads nothing else, so a
message without a row cannot be encoded, and a reply outside its row is refused on arrival. A number is never used again
for another message: two versions of the program are linked during a rolling upgrade.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Self

from attrs import frozen

from protocol.tensors import Tensor


class Message:
    """Base of every message; to cross a link, a message also needs a row.

    A message with tensors overrides `tensors` and `with_tensors`: the bytes of tensors are attached to the encoding.
    """

    __slots__ = ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Its tensors, in the order of their attached bytes."""
        return ()

    def with_tensors(self, tensors: Sequence[Tensor]) -> Self:
        """Return the message with its tensors replaced."""
        del tensors
        return self

    def check_tensors(self) -> None:
        """Raise `PeerViolation` if the rest of the message contradicts the dtypes and shapes of its tensors."""


@frozen
class Kind:
    """One message between nodes: its number on the wire and, for a request, the messages that answer it.

    A request is answered by any number of `replies`, in any order, and one `result`; other messages have no `result`.
    The reply `first`, if there is one, comes once, before all others and before the result.
    """

    number: int
    message: type[Message]
    replies: tuple[type[Message], ...] = ()
    result: type[Message] | None = None
    first: type[Message] | None = None


def by_message(kinds: Iterable[Kind]) -> dict[type[Message], Kind]:
    """Return the rows by message, in the order of their numbers; raises `ValueError` for a repeated one."""
    rows = sorted(kinds, key=lambda row: row.number)
    for row, following in pairwise(rows):
        if row.number == following.number:
            names = f"{row.message.__name__} and {following.message.__name__}"
            raise ValueError(f"{names} both have the number {row.number}; the next free one is {rows[-1].number + 1}")
    table: dict[type[Message], Kind] = {}
    for row in rows:
        if (earlier := table.setdefault(row.message, row)) is not row:
            raise ValueError(f"{row.message.__name__} has two numbers, {earlier.number} and {row.number}")
    return table
