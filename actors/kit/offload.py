"""Work whose size a client chooses, kept out of the event loop.

All tasks of a node share one thread: a text that takes a second to tokenise would stop every stream meanwhile. So all
work for a request passes through `Offload.run` with its size, under one rule. Long work runs in the supervisor's
threads, which take turns between the owners of requests. Short work runs in place, after a checkpoint, so that many
short pieces of work are as many turns of the event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Protocol, TypeVar

import trio
from attrs import frozen

T = TypeVar("T")

OFFLOAD_SIZE_MIN = 2_000
"""The least size of long work, in characters to tokenise: about a millisecond. A token id counts as one character."""


class RunInThread(Protocol):
    """Runs a function in a thread."""

    async def __call__(self, function: Callable[[], T], /, *, owner: str, size: int) -> T:
        """Return the function's result, or raise its error; raises `Overloaded` if too much work waits."""


class RunWork(Protocol):
    """Runs the work of one request, in a thread if it is long: `Offload.run`."""

    async def __call__(self, size: int, function: Callable[[], T], /) -> T:
        """Return the function's result, or raise its error; raises `Overloaded` if too much work waits."""


turns: ContextVar[Callable[[], None] | None] = ContextVar("turns", default=None)
"""What `give_turn` calls: in a thread it waits until it is this thread's turn again. None: there are no turns."""


def give_turn() -> None:
    """Let other work have the thread in which this runs; returns at once where no other waits, and outside a thread.

    Long work in Python calls it about ten times a second. Raises what ends the thread if its caller has left.
    """
    if (wait := turns.get()) is not None:
        wait()


async def run_inline(function: Callable[[], T], /, *, owner: str, size: int) -> T:  # noqa: ARG001  # the shape of `RunInThread`
    """Run work in place, long or short: for tests and for the check of a configuration, without threads."""
    await trio.lowlevel.checkpoint()
    return function()


@frozen
class Offload:
    """The work of one request."""

    run_in_thread: RunInThread
    owner: str  # the name of the client's key

    async def run(self, size: int, function: Callable[[], T], /) -> T:
        """Return the result of a function; raises `Overloaded` as `RunInThread` does. Long work runs in a thread."""
        if size >= OFFLOAD_SIZE_MIN:
            return await self.run_in_thread(function, owner=self.owner, size=size)
        await trio.lowlevel.checkpoint()
        return function()
