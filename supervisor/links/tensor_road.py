"""The roads that tensors take to the other end of a link, beside its frames.

Between nodes the bytes of tensors are attached to their messages, which is the road of this file. Within a machine
another road may leave them in memory that both processes can read, and between machines one of the field's transfer
engines may move them; then a message only describes where its tensors are. Whatever the road is, an asker and an
answerer see whole tensors.
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
    """A message as it is to be encoded, and what is held for its tensors: `expire` ends that, None if it is nothing."""

    message: Message
    expire: Callable[[], None] | None = None


class TensorRoad(Protocol):
    """The way of the tensors of requests to the other end of a link, and of those of answers back."""

    @property
    def lease_s(self) -> float:
        """For how long the other end may come for the tensors of a request that has been sent."""

    @property
    def shares(self) -> bool:
        """Whether tensors of the other end may be in memory that it shares, to be had by `take`."""

    def carry(self, message: Message) -> AbstractAsyncContextManager[Carriage]:
        """Bring the tensors of a message to where the other end can take them, until the body ends.

        Waits while there is no room. Raises `RequestError`; `TooLarge` for tensors that can never be carried.
        """

    def take(self, message: Message) -> Message:
        """Return a message of the other end with the bytes of its tensors; raises `RequestError` if it has none."""


class Attachments:
    """The road of tensors that are attached: nothing is held for them but their room on the link."""

    lease_s = inf
    shares = False

    @asynccontextmanager
    async def carry(self, message: Message) -> AsyncIterator[Carriage]:
        """Yield the message as it is."""
        await trio.lowlevel.checkpoint()
        yield Carriage(message)

    def take(self, message: Message) -> Message:
        """Return the message as it is."""
        return message
