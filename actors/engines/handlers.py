"""Handlers of an engine's operations, by the classes of their requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias, TypeVar

from protocol.messages.kind import Message

M = TypeVar("M", bound=Message)
MessageHandler: TypeAlias = Callable[[Message], Awaitable[Message]]


def handler(request_class: type[M], handle: Callable[[M], Awaitable[Message]]) -> tuple[type[Message], MessageHandler]:
    """Return an entry of a table of handlers: a class of requests, and what handles them."""

    async def handle_message(request: Message) -> Message:
        assert isinstance(request, request_class)  # as its key has it
        return await handle(request)

    return request_class, handle_message
