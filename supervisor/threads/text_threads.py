"""The thread pool for work of a size chosen by clients: tokenising, chat templates, large bodies.

Such work would block the event loop, and in a plain thread pool one client's long prompts would delay all others. So
each owner (the name of a client key) has a queue of its own, and threads are given to queues in turn: behind any number
of long prompts of one key, another key waits for one task at most. Heavy work has queues of its own and never takes
every thread, so that a short prompt finds one even without keys.

Work that lasts gives up its thread about ten times a second (`actors.kit.offload.give_turn`), and
queues again as heavy.

A thread cannot be cancelled. If its caller leaves, a thread is abandoned and counts as running until it ends,
which is the end of its turn at the latest for work that gives it up: the limit is on threads, never on callers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar, cast

import trio
from attrs import define, field, frozen

from actors.kit.offload import turns
from protocol.errors import Overloaded

T = TypeVar("T")

NO_THREAD = "can't start new thread"  # the message of Python's own RuntimeError
HEAVY_CHARACTERS_MIN = 200_000  # tokenised in about a tenth of a second


def new_lock() -> AbstractContextManager[object]:
    """Return a lock for what the work of several threads shares; it is held for moments only."""
    return threading.Lock()


@frozen
class TextLimits:
    """The number of threads, and of waiting callers."""

    threads: int = 2
    waiting_max: int = 512  # all owners together
    key_waiting_max: int = 128  # one key, or all clients without a key


@define(eq=False)
class _Waiter:
    woken: trio.Event = field(factory=trio.Event)
    has_thread: bool = False


@define(eq=False)
class _Queue:
    """The waiting callers of one owner and weight; exists while any of them waits or runs."""

    last_turn: float  # the number of its latest turn; a new queue begins just before the latest turn of all
    waiting: deque[_Waiter] = field(factory=deque)
    running: int = 0


@frozen
class Statistics:
    """The number of running threads, abandoned ones included, of waiting callers, and of owners with either."""

    running: int
    waiting: int
    owners: int


@define(eq=False)
class TextThreads:
    """A pool of threads, shared fairly between owners; an `actors.kit.offload.RunInThread`."""

    limits: TextLimits = TextLimits()
    running: int = 0  # abandoned threads included
    waiting: int = 0
    _heavy: int = 0  # running threads with heavy work
    _turns: int = 0
    _queues: dict[tuple[str, bool], _Queue] = field(factory=dict)  # keys: an owner, and whether the work is heavy

    async def __call__(self, function: Callable[[], T], /, *, owner: str, size: int) -> T:
        """Run `function` in a thread and return its result; raises its error, or `Overloaded` if a queue is full.

        `size` is the length of the text in characters. A caller that is cancelled while it waits gives up its place.
        """
        place = _Place(self, owner, size >= HEAVY_CHARACTERS_MIN)

        def work() -> T:
            turns.set(place.give_turn)
            return function()

        limiter = cast("trio.CapacityLimiter", place)
        try:
            return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=limiter)
        except RuntimeError as error:
            if str(error) == NO_THREAD:  # no memory for a stack, or too many processes: fails this request alone
                raise Overloaded("the system has no thread left to read the text in") from error
            raise

    async def acquire(self, owner: str, *, heavy: bool, again: bool = False) -> None:
        """Wait for a thread; raises `Overloaded` if too many wait already, unless it is wanted `again`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if not again:
            self._check_room(owner)
        key, waiter = (owner, heavy), _Waiter()
        if key not in self._queues:
            # Before the queue with the latest turn, and after all others. If new queues came first, an owner that
            # asks again after each answer would get a new queue each time, and overtake all waiting ones.
            self._queues[key] = _Queue(self._turns - 0.5)
        self._queues[key].waiting.append(waiter)
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
                self._queues[key].waiting.remove(waiter)
                self.waiting -= 1
                self._forget_empty(key)

    def release(self, owner: str, *, heavy: bool) -> None:
        """Return a thread to the pool."""
        self.running -= 1
        self._heavy -= heavy
        self._queues[owner, heavy].running -= 1
        self._wake()
        self._forget_empty((owner, heavy))

    def statistics(self) -> Statistics:
        """Return the counts at this moment."""
        return Statistics(self.running, self.waiting, len({owner for owner, _ in self._queues}))

    def _check_room(self, owner: str) -> None:
        if self.waiting >= self.limits.waiting_max:
            raise Overloaded(f"{self.waiting} long texts wait to be read")
        queues = (self._queues.get((owner, heavy)) for heavy in (False, True))
        own = sum(len(queue.waiting) for queue in queues if queue is not None)
        if own >= self.limits.key_waiting_max:
            raise Overloaded(f"{own} long texts of this key wait to be read")

    def _wake(self) -> None:
        """Give each free thread to the eligible queue with the oldest turn."""
        while self.running < self.limits.threads:
            heavy_allowed = self._heavy < max(1, self.limits.threads - 1)
            queues = [
                (key, queue) for key, queue in self._queues.items() if queue.waiting and (heavy_allowed or not key[1])
            ]
            if not queues:
                return
            (_, heavy), queue = min(queues, key=lambda entry: entry[1].last_turn)
            self._turns += 1
            queue.last_turn = self._turns
            queue.running += 1
            self.running += 1
            self._heavy += heavy
            self.waiting -= 1
            waiter = queue.waiting.popleft()
            waiter.has_thread = True
            waiter.woken.set()

    def _forget_empty(self, key: tuple[str, bool]) -> None:
        queue = self._queues[key]
        if not (queue.waiting or queue.running):
            del self._queues[key]


@define(eq=False)
class _Place:
    """The place of one caller among the threads: a capacity limiter for Trio, released even if the caller has left."""

    threads: TextThreads
    owner: str
    heavy: bool
    held: bool = False

    async def acquire_on_behalf_of(self, _: object) -> None:
        await self.threads.acquire(self.owner, heavy=self.heavy)
        self.held = True

    def release_on_behalf_of(self, _: object) -> None:
        if self.held:
            self.threads.release(self.owner, heavy=self.heavy)
            self.held = False

    def give_turn(self) -> None:
        """Wait until it is the turn of this thread again; raises `Cancelled` if its caller has left."""
        trio.from_thread.check_cancelled()
        if self.threads.waiting:
            trio.from_thread.run(self._queue_again)
            trio.from_thread.check_cancelled()

    async def _queue_again(self) -> None:
        self.release_on_behalf_of(None)
        self.heavy = True
        await self.threads.acquire(self.owner, heavy=True, again=True)
        self.held = True
