"""The type of the handlers of operations in an engine's host."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from protocol.messages.kind import Message

Handler: TypeAlias = Callable[[Message], Awaitable[Message]]
"""A function that carries out an operation; what it raises as a `RequestError` is the answer."""
