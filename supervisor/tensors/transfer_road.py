"""The transfer of tensors between nodes by a transfer engine: the sender offers its memory, and the receiver reads it.

A node has one memory for tensors, registered once and described in the `Hello` of its links. The sender of a message
copies its large tensors there, each behind a stamp of 16 random bytes, and describes their ranges in the message. The
receiver reads the bytes and then the stamps, and says that it has. The sender frees a range then, when the call is
over, or when the lease has passed, whichever comes first, by overwriting the stamp. So a late or lying description
gives an error, and never the bytes of another message.

Small tensors are attached, which costs less; so are all where the memory has no room, and until the other end has read
this end's memory by way of trial. Where the network does not let the transfer engine through, nothing else changes.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import trio
from attrs import define, evolve, field

from protocol.errors import LinkLost, PeerViolation, RequestError
from protocol.link.frames import OfferedMemory
from protocol.messages.kind import Message
from protocol.tensors import STAMP_BYTES, STAMP_GAP_BYTES, MemoryRange, Tensor
from supervisor.links.tensor_road import Carriage
from supervisor.tensors.memory_ranges import MemoryRanges
from supervisor.tensors.transfer_agent import TransferAgent, TransferFailed, address_of
from supervisor.tensors.transfer_thread import TransferThread

log = logging.getLogger(__name__)

TRANSFERRED_BYTES_MIN = 64 * 1024  # the smallest tensor that is not attached
MEMORY_BYTES = 256 * 1024 * 1024  # offered by a node; pages that were never used take no memory
PIECE_BYTES = 1024 * 1024  # copied in one turn of the event loop
NO_STAMP = bytes(STAMP_BYTES)
TRIAL_S = 10.0


@define(eq=False)
class TransferMemory:
    """The memory in which a node offers tensors, and its transfer engine."""

    new_nonce: Callable[[], bytes]  # random bytes
    size: int = MEMORY_BYTES
    transfers: TransferThread = field(init=False)
    stamp: bytes = field(default=b"", init=False)  # at the beginning, for trials
    _memory: mmap.mmap = field(init=False)
    _ranges: MemoryRanges = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._memory = mmap.mmap(-1, self.size)
        # A trial reads one byte behind the stamp, as any read does.
        self._ranges = MemoryRanges(STAMP_GAP_BYTES + STAMP_GAP_BYTES, self.size)
        self.transfers = TransferThread(self._new_agent, self._memory)

    async def run(  # noqa: ASYNC128  # the thread's run calls started()
        self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Run the transfer engine until cancelled; raises `StartFailed`."""
        self.stamp = self._new_stamp()
        self._memory[:STAMP_BYTES] = self.stamp
        await self.transfers.run(task_status=task_status)

    @property
    def offered(self) -> OfferedMemory:
        """The memory for a `Hello`, while it runs."""
        return OfferedMemory(self.transfers.description, address_of(self._memory), self.size, self.stamp)

    @property
    def free_bytes(self) -> int:
        """The bytes that no message takes."""
        return self._ranges.free_bytes

    def take(self, tensors: Sequence[Tensor]) -> list[MemoryRange] | None:
        """Take a range for each tensor; None if there is no room for all."""
        taken: list[MemoryRange] = []
        for tensor in tensors:
            size = tensor.data.nbytes
            if (offset := self._ranges.take(STAMP_GAP_BYTES + size)) is None:
                self.free(taken)
                return None
            taken.append(MemoryRange(offset, size, self._new_stamp()))
            self.transfers.offer(1)
        return taken

    async def write(self, place: MemoryRange, data: memoryview) -> None:
        """Copy the bytes of a tensor into its range; other tasks run after each piece."""
        begin, data = place.offset + STAMP_GAP_BYTES, data.cast("B")
        for done in range(0, place.size, PIECE_BYTES):
            piece = data[done : done + PIECE_BYTES]
            self._memory[begin + done : begin + done + len(piece)] = piece
            await trio.lowlevel.checkpoint()
        self._memory[place.offset : place.offset + STAMP_BYTES] = place.stamp

    def free(self, places: list[MemoryRange]) -> None:
        """Free ranges, and empty their list; their readers notice."""
        while places:
            place = places.pop()
            self._memory[place.offset : place.offset + STAMP_BYTES] = NO_STAMP
            self._ranges.give_back(place.offset, STAMP_GAP_BYTES + place.size)
            self.transfers.offer(-1)

    def _new_stamp(self) -> bytes:
        return self.new_nonce()[:STAMP_BYTES]

    def _new_agent(self) -> TransferAgent:
        return TransferAgent(f"espalier-{self.new_nonce()[:STAMP_BYTES].hex()}")


@define(eq=False)
class OtherMemory:
    """The memory of the other end of a link, once it could be read, and whether the other end can read this one's."""

    own: TransferMemory
    may_offer: bool = field(default=False, init=False)
    _agent: str | None = field(default=None, init=False)  # the other end's
    _memory: OfferedMemory | None = field(default=None, init=False)

    @property
    def offered(self) -> OfferedMemory:
        """The memory of this end."""
        return self.own.offered

    async def run(self, memory: OfferedMemory, on_readable: Callable[[], None]) -> None:
        """Try to read the memory of the other end, and keep its agent until cancelled."""
        transfers = self.own.transfers
        try:
            agent = await transfers.load(memory.agent)
        except TransferFailed as error:
            log.warning("tensors of a node are attached", extra={"reason": str(error)})
            return
        try:
            if await self._is_readable(agent, memory):
                self._agent, self._memory = agent, memory
                on_readable()
            await trio.sleep_forever()
        finally:
            self._agent = self._memory = None
            transfers.unload(agent)

    def offer(self) -> None:
        """Offer tensors from now on."""
        self.may_offer = True

    def check(self, message: Message) -> None:
        """Raise `PeerViolation` for tensors outside of the memory of the other end, or before it could be read."""
        if (memory := self._memory) is None:
            raise PeerViolation("tensors in a memory that this end has not read by way of trial")
        for tensor in message.tensors:
            if (place := tensor.remote) is None:
                continue
            end = place.offset + STAMP_GAP_BYTES + place.size
            if place.offset < 0 or place.size < 1 or end > memory.size or len(place.stamp) != STAMP_BYTES:
                raise PeerViolation(f"a tensor of {place.size} bytes at {place.offset}, in {memory.size} offered bytes")

    async def read(self, message: Message) -> Message:
        """Return a message with the bytes of its tensors; raises `RequestError`."""
        if self._agent is None or self._memory is None:
            raise LinkLost("the link to a node with tensors has ended")
        places = [tensor.remote for tensor in message.tensors if tensor.remote is not None]
        source = [(self._memory.address + place.offset, place.size) for place in places]
        views = iter(await self.own.transfers.read(self._agent, source, [place.stamp for place in places]))
        tensors = [
            tensor if tensor.remote is None else evolve(tensor, data=next(views), remote=None)
            for tensor in message.tensors
        ]
        return message.with_tensors(tensors)

    async def _is_readable(self, agent: str, memory: OfferedMemory) -> bool:
        """Whether the stamp at the beginning of the other end's memory can be read."""
        try:
            with trio.fail_after(TRIAL_S):
                await self.own.transfers.read(agent, [(memory.address, 1)], [memory.stamp])
        except (RequestError, trio.TooSlowError) as error:
            log.warning("tensors of a node are attached", extra={"reason": str(error) or "a trial took too long"})
            return False
        return True


@define(eq=False)
class TransferRoad:
    """The transfer to the other end of one link."""

    memory: TransferMemory
    lease_s: float = 30.0
    shares: bool = False
    reader: OtherMemory = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.reader = OtherMemory(self.memory)

    @asynccontextmanager
    async def carry(self, message: Message) -> AsyncIterator[Carriage]:
        """Copy the large tensors of a message into the offered memory, and yield the message with their ranges.

        The other end may read them until the body ends, or the carriage expires.
        """
        tensors = list(message.tensors)
        large = [place for place, tensor in enumerate(tensors) if tensor.data.nbytes >= TRANSFERRED_BYTES_MIN]
        taken = self.memory.take([tensors[place] for place in large]) if large and self.reader.may_offer else None
        if taken is None:
            await trio.lowlevel.checkpoint()
            yield Carriage(message)
            return
        try:
            for place, into in zip(large, taken, strict=True):
                await self.memory.write(into, tensors[place].data)
                tensors[place] = evolve(tensors[place], data=memoryview(b""), shared=None, remote=into)
            yield Carriage(message.with_tensors(tensors), lambda: self.memory.free(taken))
        finally:
            self.memory.free(taken)

    def take(self, message: Message) -> Message:
        """Return the message unchanged: there is no shared memory between nodes."""
        return message
