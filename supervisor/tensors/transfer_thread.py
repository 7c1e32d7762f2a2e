"""The reads of other nodes' memory by a transfer engine, in one thread that uses it, off the event loop.

The thread takes commands in their order, and lets the engine progress: every half millisecond while anything is read or
offered, else twenty times a second, for connections. A read that
nobody waits for any more goes on until it is over: its bytes may arrive at any time until then, so its buffer must not
be freed, and its node's agent not be forgotten. A process that stands still keeps its reads for as long; `bytes_max`
bounds their bytes. A node that dies ends them within a moment.

After the bytes their stamps are read. Equal ones mean that the bytes were not freed before they had been read.
"""

from __future__ import annotations

import mmap
import queue
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import trio
from attrs import define, field

from protocol.byte_budget import ByteBudget, ByteShare
from protocol.errors import DeadlineExceeded, LinkLost, Overloaded, RequestError, StartFailed
from protocol.tensors import STAMP_BYTES, STAMP_GAP_BYTES
from supervisor.links.waiting import taken_share
from supervisor.tensors.transfer_agent import (
    Handle,
    NoTransfers,
    Range,
    Registered,
    TransferAgent,
    TransferFailed,
    address_of,
)

T = TypeVar("T")
POLL_S, IDLE_S = 0.0005, 0.05
ROOM_S = 10.0  # the longest wait for room: what never ends may hold it


@define(eq=False)
class Read:
    """One read: ranges of a node's memory, each behind its stamp, into a buffer of its own."""

    agent: str
    source: Sequence[Range]  # the stamps' addresses, with the sizes of the bytes behind them
    stamps: Sequence[bytes]
    share: ByteShare
    on_over: Callable[[Read], None]  # called in the thread
    buffer: mmap.mmap = field(init=False)
    error: RequestError | None = field(default=None, init=False)
    over: trio.Event = field(factory=trio.Event, init=False)
    _registered: Registered | None = field(default=None, init=False)
    _handle: Handle | None = field(default=None, init=False)
    _reads_stamps: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self.buffer = mmap.mmap(-1, sum(size + STAMP_BYTES for _, size in self.source))

    @property
    def views(self) -> list[memoryview]:
        """The bytes of each range."""
        whole, views, offset = memoryview(self.buffer).toreadonly(), [], 0
        for _, size in self.source:
            views.append(whole[offset : offset + size])
            offset += size
        return views

    # In the thread -----------------------------------------------------------------------

    def begin(self, agent: TransferAgent) -> None:
        """Begin to read; raises `TransferFailed`."""
        base = address_of(self.buffer)
        self._registered = agent.register((base, len(self.buffer)))
        into, offset = [], base
        for _, size in self.source:
            into.append((offset, size))
            offset += size
        source = [(address + STAMP_GAP_BYTES, size) for address, size in self.source]
        self._handle = agent.begin(self.agent, into, source)

    def advance(self, agent: TransferAgent) -> bool:
        """Return whether the read is over; raises `TransferFailed`."""
        assert self._handle is not None
        if not agent.is_over(self._handle):
            return False
        if self._reads_stamps:
            return True
        handle, self._handle, self._reads_stamps = self._handle, None, True
        agent.release(handle)
        base = address_of(self.buffer) + sum(size for _, size in self.source)
        into = [(base + number * STAMP_BYTES, STAMP_BYTES) for number in range(len(self.source))]
        self._handle = agent.begin(self.agent, into, [(address, STAMP_BYTES) for address, _ in self.source])
        return agent.is_over(self._handle)

    def end(self, agent: TransferAgent, failure: TransferFailed | None) -> None:
        """Release what NIXL holds for the read, and compare the stamps."""
        handle, self._handle = self._handle, None
        registered, self._registered = self._registered, None
        with suppress(TransferFailed):  # a library that keeps something of a read that is over
            if handle is not None:
                agent.release(handle)
        with suppress(TransferFailed):
            if registered is not None:
                agent.deregister(registered)
        if failure is not None:
            self.error = LinkLost(f"the tensors of a message could not be read: {failure}")
        elif self.buffer[-STAMP_BYTES * len(self.stamps) :] != b"".join(self.stamps):
            self.error = DeadlineExceeded("the tensors of a message are not there any more")
        self.on_over(self)


@define(eq=False)
class TransferThread:
    """The thread of a node's transfer engine, and its memory for tensors that other nodes read."""

    new_agent: Callable[[], TransferAgent]
    memory: mmap.mmap  # offered to other nodes
    bytes_max: int = 512 * 1024 * 1024
    description: bytes = field(default=b"", init=False)  # of the agent, while `run` runs
    _budget: ByteBudget = field(init=False)
    _commands: queue.SimpleQueue[Callable[[TransferAgent], None] | None] = field(init=False)
    _running: list[Read] = field(factory=list, init=False)
    _offered: int = field(default=0, init=False)
    _kept: list[mmap.mmap] = field(factory=list, init=False)  # of reads that an earlier agent had not ended
    _loaded: Counter[str] = field(factory=Counter, init=False)  # links by the agent of their other end
    _token: trio.lowlevel.TrioToken | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._budget = ByteBudget(self.bytes_max)
        self._commands = queue.SimpleQueue()

    @property
    def reading_bytes(self) -> int:
        """The bytes of running reads, with abandoned ones."""
        return self._budget.taken_bytes

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the thread until cancelled; raises `StartFailed` if there can be no agent."""
        self._token, self._commands = trio.lowlevel.current_trio_token(), queue.SimpleQueue()
        ready = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(trio.to_thread.run_sync, self._work, ready, limiter=trio.CapacityLimiter(1)))
            try:
                await ready.wait()
                task_status.started()
                await trio.sleep_forever()
            finally:
                self._commands.put(None)

    async def load(self, description: bytes) -> str:
        """Load another node's agent for one link, and return its name; raises `TransferFailed`."""

        def load(agent: TransferAgent) -> str:
            name = agent.load(description)
            self._loaded[name] += 1
            return name

        return await self._call(load)

    def offer(self, count: int) -> None:
        """Count offered ranges, which other nodes may read from now on, or no longer if `count` is negative."""
        self._offered += count
        if self._offered == count > 0:  # the thread may be idle
            self._commands.put(_nothing)

    def unload(self, name: str) -> None:
        """Forget an agent once its last link has ended and nothing of it is being read."""

        def unload(agent: TransferAgent) -> None:
            self._loaded[name] -= 1
            self._forget(agent)

        self._commands.put(unload)

    async def read(self, agent: str, source: Sequence[Range], stamps: Sequence[bytes]) -> list[memoryview]:
        """Return the bytes behind stamps in another node's memory; raises `RequestError` if there are none."""
        size = sum(size for _, size in source)
        if size > self.bytes_max:
            raise Overloaded(f"tensors of {size} bytes; {self.bytes_max} are read at once")
        with trio.move_on_after(ROOM_S) as waiting:
            share = await taken_share(partial(self._budget.share, size))
        if waiting.cancelled_caught:
            raise Overloaded("there is no room for the tensors of another node")
        try:
            read = Read(agent, source, stamps, share, self._on_over)
        except BaseException:
            share.give_back()
            raise
        self._commands.put(partial(self._begin, read))
        await read.over.wait()
        if read.error is not None:
            raise read.error
        return read.views

    async def _call(self, function: Callable[[TransferAgent], T]) -> T:
        over, results, errors = trio.Event(), list[T](), list[TransferFailed]()

        def command(agent: TransferAgent) -> None:
            try:
                results.append(function(agent))
            except TransferFailed as error:
                errors.append(error)
            self._in_loop(over.set)

        self._commands.put(command)
        await over.wait()
        if errors:
            raise errors[0]
        return results[0]

    def _on_over(self, read: Read) -> None:
        def over() -> None:
            read.share.give_back()
            read.over.set()

        self._in_loop(over)

    def _in_loop(self, function: Callable[[], None]) -> None:
        assert self._token is not None
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(function)

    # In the thread -----------------------------------------------------------------------

    def _work(self, ready: trio.Event) -> None:
        """Carry out commands and watch the reads, until a command is None."""
        try:
            agent = self.new_agent()
            registered = agent.register((address_of(self.memory), len(self.memory)))
        except (NoTransfers, TransferFailed) as error:
            raise StartFailed(f'tensors = "nixl": {error}') from error
        self.description = agent.description
        self._in_loop(ready.set)
        try:
            while True:
                try:
                    command = self._commands.get(timeout=POLL_S if self._running or self._offered else IDLE_S)
                except queue.Empty:
                    self._poll(agent)
                    continue
                if command is None:
                    return
                command(agent)
                self._poll(agent)
        finally:
            self._close(agent, registered)

    def _begin(self, read: Read, agent: TransferAgent) -> None:
        try:
            read.begin(agent)
        except TransferFailed as error:
            read.end(agent, error)
        else:
            self._running.append(read)

    def _poll(self, agent: TransferAgent) -> None:
        with suppress(TransferFailed):  # each read finds out by itself
            agent.progress()
        for read in list(self._running):
            try:
                over, failure = read.advance(agent), None
            except TransferFailed as error:
                over, failure = True, error
            if over:
                self._running.remove(read)
                read.end(agent, failure)
                self._forget(agent)

    def _forget(self, agent: TransferAgent) -> None:
        """Forget the agents without a link and without a read."""
        busy = {read.agent for read in self._running}
        for name in [name for name, links in self._loaded.items() if links <= 0 and name not in busy]:
            del self._loaded[name]
            try:
                agent.unload(name)
            except TransferFailed:
                continue  # it has ended, and the library has forgotten it

    def _close(self, agent: TransferAgent, registered: Registered) -> None:
        """End all reads; their buffers are kept, since the agent may write until it has ended."""
        ended, self._running = self._running, []
        self._kept += [read.buffer for read in ended]
        self._loaded.clear()
        with suppress(TransferFailed):
            agent.deregister(registered)
        for read in ended:
            read.error = LinkLost("the transfer engine of this node has ended")
            self._on_over(read)


def _nothing(_: TransferAgent) -> None:
    pass
