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
    """Return a share of a budget once it is taken; `begin` makes it, with what is to be called then.

    `on_waiting` is called if it has to wait, and `on_left` when it is given back because this task was cancelled: those
    that waited behind it may have theirs now.
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
