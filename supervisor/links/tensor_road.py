"""The interface for moving tensors to the other end of a link, beside its frames.

Between nodes the bytes of tensors are attached to their messages, as this file implements. Within a machine they may
stay in shared memory, and between machines a transfer engine may move them; then a message only has the places of its
tensors. With every implementation askers and answerers get whole tensors.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from math import inf
from typing import Protocol

import trio
from attrs import frozen

from protocol.messages.kind import Message


@frozen
class Carriage:
    """A message ready for encoding, and the end of the lease of its tensors, None without a lease."""

    message: Message
    expire: Callable[[], None] | None = None


class TensorRoad(Protocol):
    """The transfer of the tensors of requests and answers between the ends of a link."""

    @property
    def lease_s(self) -> float:
        """The lease of a sent request's tensors for the other end, in seconds."""

    @property
    def shares(self) -> bool:
        """Whether tensors of the other end may be in its shared memory, for `take`."""

    def carry(self, message: Message) -> AbstractAsyncContextManager[Carriage]:
        """Make the tensors of a message available to the other end, until the body ends.

        Waits while there is no room. Raises `RequestError`; `TooLarge` for tensors beyond the limit.
        """

    def take(self, message: Message) -> Message:
        """Return a message of the other end with the bytes of its tensors; raises `RequestError` if they are gone."""


class Attachments:
    """Tensors attached to their messages: they hold nothing but their room on the link."""

    lease_s = inf
    shares = False

    @asynccontextmanager
    async def carry(self, message: Message) -> AsyncIterator[Carriage]:
        """Yield the message unchanged."""
        await trio.lowlevel.checkpoint()
        yield Carriage(message)

    def take(self, message: Message) -> Message:
        """Return the message unchanged."""
        return message
