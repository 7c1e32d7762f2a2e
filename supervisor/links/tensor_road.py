"""The interface for moving tensors to the other end of a link, beside its frames.

Between nodes the bytes of tensors are attached to their messages, as this file implements. Within a machine they may
stay in shared memory, and between nodes a transfer engine may move them; then a message only has the places of its
tensors. With every implementation askers and answerers get whole tensors.

Shared memory is opened in the turn in which its message arrives. To read another node's memory takes time, so only
requests and results may be there: after a reply other replies may come, which must not overtake it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from math import inf
from typing import Protocol

import trio
from attrs import frozen

from protocol.link.frames import OfferedMemory
from protocol.messages.kind import Message


@frozen
class Carriage:
    """A message ready for encoding, and the end of the lease of its tensors, None without a lease."""

    message: Message
    expire: Callable[[], None] | None = None


class MemoryReader(Protocol):
    """The reading of tensors in the memory of the other end of a link, and its reading of this end's."""

    @property
    def offered(self) -> OfferedMemory:
        """The memory of this end, for its `Hello`."""

    async def run(self, memory: OfferedMemory, on_readable: Callable[[], None]) -> None:
        """Try to read the memory of the other end, and allow its use while the link lasts, until cancelled.

        `on_readable` is called if it could be read.
        """

    def offer(self) -> None:
        """Offer tensors from now on: the other end can read this end's memory."""

    def check(self, message: Message) -> None:
        """Raise `PeerViolation` for tensors outside of the memory of the other end."""

    async def read(self, message: Message) -> Message:
        """Return a message with the bytes of its tensors from the memory of the other end.

        Raises `LinkLost` if they cannot be read, `DeadlineExceeded` if they are not there any more, and `Overloaded` if
        there is no room for them.
        """


class TensorRoad(Protocol):
    """The transfer of the tensors of requests and answers between the ends of a link."""

    @property
    def lease_s(self) -> float:
        """The lease of a sent request's tensors for the other end, in seconds."""

    @property
    def shares(self) -> bool:
        """Whether tensors of the other end may be in its shared memory, for `take`."""

    @property
    def reader(self) -> MemoryReader | None:
        """The reader of the other end's memory; None: tensors are never there."""

    def carry(self, message: Message) -> AbstractAsyncContextManager[Carriage]:
        """Make the tensors of a message available to the other end, until the body ends.

        Waits while there is no room. Raises `RequestError`; `TooLarge` for tensors beyond the limit.
        """

    def take(self, message: Message) -> Message:
        """Return a message of the other end with the bytes of its tensors; raises `RequestError` if they are gone.

        Those in another node's memory are read by `reader`.
        """


class Attachments:
    """Tensors attached to their messages: they hold nothing but their room on the link."""

    lease_s = inf
    shares = False
    reader: MemoryReader | None = None

    @asynccontextmanager
    async def carry(self, message: Message) -> AsyncIterator[Carriage]:
        """Yield the message unchanged."""
        await trio.lowlevel.checkpoint()
        yield Carriage(message)

    def take(self, message: Message) -> Message:
        """Return the message unchanged."""
        return message


def is_elsewhere(message: Message) -> bool:
    """Return whether tensors of a message are in the memory of another node."""
    return any(tensor.remote is not None for tensor in message.tensors)
