"""Waiting for a share of a budget of bytes, in Trio."""

from __future__ import annotations

from collections.abc import Callable

import trio

from protocol.byte_budget import ByteShare


def _ignore() -> None:
    pass


async def taken_share(
    begin: Callable[[Callable[[], None]], ByteShare],
    on_waiting: Callable[[], None] = _ignore,
    on_left: Callable[[], None] = _ignore,
) -> ByteShare:
    """Return a share of a budget once it is taken; `begin` makes it from the callback for this event.

    `on_waiting` is called if the share has to wait. `on_left` is called after a cancelled wait: the shares behind it
    may be taken now.
    """
    taken = trio.Event()
    share, left = begin(taken.set), True
    try:
        if share.taken:
            await trio.lowlevel.checkpoint()
        else:
            on_waiting()
            await taken.wait()
        left = False
    finally:
        if left:
            share.give_back()
            on_left()
    return share
