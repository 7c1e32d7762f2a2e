"""Calls between actors whose messages may be of any type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import trio

from actors.kit import calls
from actors.kit import priority_inbox as inboxes

AnyAddress: TypeAlias = calls.Address[Any, Any, Any]
AnyAnswer: TypeAlias = calls.Answer[Any, Any]
AnyCall: TypeAlias = calls.Call[Any, Any, Any]
AnyPriorityInbox: TypeAlias = inboxes.PriorityInbox[Any, Any, Any]


def mailbox(size: int) -> tuple[AnyAddress, trio.MemoryReceiveChannel[AnyCall]]:
    return calls.mailbox(size)


def priority_inbox(size: int, *keys: Callable[[Any], Any]) -> tuple[AnyAddress, AnyPriorityInbox]:
    return inboxes.priority_inbox(size, *keys)
