"""The transfer of tensors between a node and the process of an engine: memory mapped by both, instead of the socket.

Tensors in a region of this process are described without a copy: pixels from a decoder, and embeddings from another
engine. Small tensors are attached, which costs less.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from attrs import define

from actors.engines.shared_tensors import SHARED_BYTES_MIN, open_tensors, passed_on
from protocol.errors import InternalError
from protocol.messages.kind import Message
from protocol.tensors import Tensor
from supervisor.links.tensor_road import Carriage, MemoryReader
from supervisor.tensors.shared_memory import SharedMemory


@define(eq=False)
class SharedMemoryRoad:
    """The transfer to the process with an id on this machine; None: any process may share tensors."""

    memory: SharedMemory
    lease_s: float = 30.0
    process: int | None = None
    shares: bool = True
    reader: MemoryReader | None = None

    @asynccontextmanager
    async def carry(self, message: Message) -> AsyncIterator[Carriage]:
        """Copy the large tensors of a message into a region, and yield the message with their description.

        The other end may open the region until the body ends, or the carriage expires. Waits for room within the limit
        of shared memory; tensors beyond the whole limit are attached.
        """
        tensors = [passed_on(tensor) or tensor for tensor in message.tensors]
        copied = [place for place, tensor in enumerate(tensors) if _is_large(tensor)]
        large = [tensors[place] for place in copied]
        if not copied or not self.memory.can_hold(large):
            await trio.lowlevel.checkpoint()
            yield Carriage(message.with_tensors(tensors))
            return
        async with self.memory.copied(large) as region:
            for place, tensor in zip(copied, region.tensors, strict=True):
                tensors[place] = tensor
            yield Carriage(message.with_tensors(tensors), region.close)

    def take(self, message: Message) -> Message:
        """Return a message with the bytes of its tensors, mapped without a copy."""
        places = [tensor.shared for tensor in message.tensors if tensor.shared is not None]
        if self.process is not None and any(place.process != self.process for place in places):
            raise InternalError("the tensors of a message are in the memory of another process than its sender's")
        opened, mappings = open_tensors(message.tensors)
        for mapping in mappings:
            self.memory.keep(mapping)
        return message.with_tensors(opened)


def _is_large(tensor: Tensor) -> bool:
    return len(tensor.data) >= SHARED_BYTES_MIN
