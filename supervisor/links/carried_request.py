"""A request with tensors, sent when they have been carried and there is room for them.

It has a task of the link's nursery, which owns the resources of its tensors: with the end of the call, or of the link,
the task ends and releases them. Its asker waits only for the answer.
"""

from __future__ import annotations

from collections.abc import Callable

import trio
from attrs import define, field

from actors.kit.calls import Answer
from protocol.errors import RequestError
from protocol.messages.kind import Message


@define(eq=False)
class CarriedRequest:
    """One request with tensors, from its beginning to its end."""

    request: Message
    credit: int
    to: str
    until: float  # the asker's deadline
    answer: Answer[Message, Message]
    stream: int | None = None  # None until it has been sent
    expire: Callable[[], None] | None = None  # ends the lease of the tensors for the other end
    scope: trio.CancelScope = field(factory=trio.CancelScope, init=False)

    def fail_unsent(self, error: RequestError) -> None:
        """Fail the request and stop carrying its tensors, unless it has been sent."""
        if self.stream is None:
            self.answer.fail(error)
            self.scope.cancel(reason=error.detail)

    def leave(self, error: RequestError) -> None:
        """End the request of an asker that has left, and the lease of its tensors."""
        self.fail_unsent(error)
        if self.expire is not None:
            self.expire()

    async def hold(self, lease_s: float) -> None:
        """Wait until the sent request is over; the lease of its tensors expires after `lease_s`."""
        with trio.move_on_after(lease_s):
            await self.answer.over.wait()
        if self.expire is not None:
            self.expire()
        await self.answer.over.wait()
