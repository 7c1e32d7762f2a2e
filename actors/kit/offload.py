"""Work whose size a client chooses, kept out of the turns of the event loop.

Whatever is computed for a request passes through `Work.run` with its size, and there is one rule for what is long. What
is long runs in threads that the supervisor owns, which take turns between the owners of requests; what is short runs
here, with a checkpoint before it, so that many short things are many turns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import trio
from attrs import frozen

T = TypeVar("T")

OFFLOAD_SIZE_MIN = 2_000
"""The size from which on work is long, in characters to tokenise: about a millisecond. A token id counts as one."""


class RunInThread(Protocol):
    """Runs long work in a thread."""

    async def __call__(self, function: Callable[[], T], /, *, owner: str, size: int) -> T:
        """Return what the function returns, or raise what it raises; raises `Overloaded` if too much waits already."""


async def run_inline(function: Callable[[], T], /, *, owner: str, size: int) -> T:  # noqa: ARG001  # the shape of `RunInThread`
    """Run work here, whatever its size: where there are no threads, as in tests and in a check of the file."""
    await trio.lowlevel.checkpoint()
    return function()


@frozen
class Offload:
    """What one request has to compute."""

    aside: RunInThread
    owner: str  # the name of the client's key

    async def run(self, size: int, function: Callable[[], T]) -> T:
        """Return what the function returns, in a thread if it is long; raises `Overloaded` as `RunInThread` does."""
        if size >= OFFLOAD_SIZE_MIN:
            return await self.aside(function, owner=self.owner, size=size)
        await trio.lowlevel.checkpoint()
        return function()
