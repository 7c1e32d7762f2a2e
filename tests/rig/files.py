"""The reading of files without threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import trio

T = TypeVar("T")


async def read_inline(function: Callable[[], T], /) -> T:
    """Run a function in the calling thread, however long it takes; a `FileReader`."""
    await trio.lowlevel.checkpoint()
    return function()
