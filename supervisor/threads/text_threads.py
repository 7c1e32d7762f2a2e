"""The threads for work whose size a client chooses: tokenising, chat templates, large bodies.

Whoever waits for a thread waits in a line of its owner, the name of a client's key, and owners take turns: behind
however many long prompts of one key, another waits for one task at most. Heavy work has lines of its own and never
takes every thread, so that without keys, too, a short prompt finds one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Annotated, TypeVar, cast

import trio
from attrs import define, field, frozen

from protocol.dialects.options import Within
from protocol.errors import Overloaded

T = TypeVar("T")

NO_THREAD = "can't start new thread"  # as Python says it
HEAVY_CHARACTERS_MIN = 200_000  # in characters to tokenise: about a tenth of a second

Count = Annotated[int, Within(at_least=1, at_most=1_000_000_000)]


@frozen
class TextLimits:
    """`[gateway.text]`: what reading and writing text may take beside the event loop."""

    threads: Annotated[int, Within(at_least=1, at_most=64)] = 2
    waiting_max: Count = 512  # for a thread, of all owners together
    key_waiting_max: Count = 128  # of one owner: a key, or all that come without one
    tokenize_tokens_max: Count = 262_144  # of one text or conversation at /tokenize, of one list at /detokenize


@define(eq=False)
class _Waiter:
    woken: trio.Event = field(factory=trio.Event)
    has_thread: bool = False


@define(eq=False)
class _Line:
    """Who waits of one owner and weight; it is there while somebody waits or runs."""

    served: float  # the number of the turn that it had last, or of its place among them when it came
    waiting: deque[_Waiter] = field(factory=deque)
    running: int = 0


@define(eq=False)
class TextThreads:
    """A pool of threads that takes turns between owners; an `actors.kit.offload.Aside`."""

    limits: TextLimits = TextLimits()
    running: int = 0  # whoever asked may have left since: a thread cannot be cancelled
    waiting: int = 0
    _heavy: int = 0  # of those that run
    _turns: int = 0
    _lines: dict[tuple[str, bool], _Line] = field(factory=dict)  # by owner, and whether their work is heavy

    async def __call__(self, function: Callable[[], T], /, *, owner: str, size: int) -> T:
        """Return what the function returns, run in a thread; raises what it raises, or `Overloaded` at a full line.

        Leaving while it waits gives up the place; leaving while it runs abandons the thread, which counts to its end.
        """
        turn = cast("trio.CapacityLimiter", _Turn(self, owner, size >= HEAVY_CHARACTERS_MIN))
        try:
            return await trio.to_thread.run_sync(function, abandon_on_cancel=True, limiter=turn)
        except RuntimeError as error:
            if str(error) == NO_THREAD:  # no memory for its stack, or too many processes: this request's loss alone
                raise Overloaded("the system has no thread left to read the text in") from error
            raise

    async def acquire(self, owner: str, *, heavy: bool) -> None:
        """Wait for a thread; raises `Overloaded` if too much waits already."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check_room(owner)
        key, waiter = (owner, heavy), _Waiter()
        if key not in self._lines:
            # Ahead of the line whose turn was last, and behind all others: else a line of somebody who asks again as
            # soon as there is an answer would be a new one each time, and go ahead of whoever waits, for ever.
            self._lines[key] = _Line(self._turns - 0.5)
        self._lines[key].waiting.append(waiter)
        self.waiting += 1
        self._wake()
        taken = False
        try:
            await waiter.woken.wait()
            taken = True
        finally:
            if waiter.has_thread and not taken:
                self.release(owner, heavy=heavy)
            elif not waiter.has_thread:
                self._lines[key].waiting.remove(waiter)
                self.waiting -= 1
                self._tidy(key)

    def release(self, owner: str, *, heavy: bool) -> None:
        """Give a thread back, to whoever is next."""
        self.running -= 1
        self._heavy -= heavy
        self._lines[owner, heavy].running -= 1
        self._wake()
        self._tidy((owner, heavy))

    def _check_room(self, owner: str) -> None:
        if self.waiting >= self.limits.waiting_max:
            raise Overloaded(f"{self.waiting} long texts wait to be read")
        lines = (self._lines.get((owner, heavy)) for heavy in (False, True))
        own = sum(len(line.waiting) for line in lines if line is not None)
        if own >= self.limits.key_waiting_max:
            raise Overloaded(f"{own} long texts of this key wait to be read")

    def _wake(self) -> None:
        """Give each free thread to the line that has waited longest for a turn, of those that may have it."""
        while self.running < self.limits.threads:
            room = self._heavy < max(1, self.limits.threads - 1)
            lines = [(key, line) for key, line in self._lines.items() if line.waiting and (room or not key[1])]
            if not lines:
                return
            (_, heavy), line = min(lines, key=lambda each: each[1].served)
            self._turns += 1
            line.served = self._turns
            line.running += 1
            self.running += 1
            self._heavy += heavy
            self.waiting -= 1
            waiter = line.waiting.popleft()
            waiter.has_thread = True
            waiter.woken.set()

    def _tidy(self, key: tuple[str, bool]) -> None:
        line = self._lines[key]
        if not (line.waiting or line.running):
            del self._lines[key]


@frozen(eq=False)
class _Turn:
    """What Trio asks for a thread, and gives it back to once the thread has ended, whoever has left by then."""

    threads: TextThreads
    owner: str
    heavy: bool

    async def acquire_on_behalf_of(self, _: object) -> None:
        await self.threads.acquire(self.owner, heavy=self.heavy)

    def release_on_behalf_of(self, _: object) -> None:
        self.threads.release(self.owner, heavy=self.heavy)
