"""A process with one end of a link whose tensors go by NIXL: `python -m tests.rig.transfer_process DESCRIPTOR LEASE_S`.

It answers each `Encode` by embeddings with the bytes of the pixels, and `GetLoad` by the free bytes of its memory. The
digest of an item may ask for something else: to lie about the place of the result, to free it at once, or to die.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from subprocess import Popen
from typing import cast

import trio
from attrs import define, evolve, frozen

from actors.kit.calls import Function
from protocol.errors import PeerLost, PeerViolation
from protocol.link.peer import Peer
from protocol.messages.engine import EngineLoad, GetLoad
from protocol.messages.kind import Message
from protocol.messages.media import Encode, Encoded
from protocol.tensors import BYTES, Dtype, MemoryRange, Tensor
from supervisor.links.link import Link
from supervisor.links.serving import Service, Services
from supervisor.links.tensor_road import Carriage
from supervisor.links.transport import SocketTransport
from supervisor.tensors.transfer_road import TransferMemory, TransferRoad
from tests.rig.tensors import embeddings

BEYOND, STAMP, FREES, DIES = "01", "02", "03", "04"  # the first digits of a digest: what is to go wrong with its result
MEMORY_BYTES = 160 * 1024 * 1024


def encoded(request: Encode) -> Encoded:
    """Return the result for an item: its own bytes, as elements of the type that its id names, else 32-bit floats."""
    dtype = next((each for each in Dtype if each == request.id), Dtype.FLOAT32)
    data = request.item.data.data
    result = embeddings(request.item, 8)
    return Encoded(evolve(result, data=Tensor(dtype, (result.tokens, len(data) // BYTES[dtype]), data)))


@define(eq=False)
class LyingRoad(TransferRoad):
    """The road, which says of some results what is not true."""

    @asynccontextmanager
    async def carry(self, message: Message) -> AsyncIterator[Carriage]:
        async with TransferRoad.carry(self, message) as carriage:
            lie = message.item.digest[:2] if isinstance(message, Encoded) else ""
            (tensor,) = carriage.message.tensors
            place = tensor.remote
            if place is not None and lie == BEYOND:
                place = MemoryRange(self.memory.size - place.size, place.size, place.stamp)
            elif place is not None and lie == STAMP:
                place = evolve(place, stamp=bytes(16))
            elif lie == FREES and carriage.expire is not None:
                carriage.expire()
            elif lie == DIES:
                os.kill(os.getpid(), signal.SIGKILL)
            yield evolve(carriage, message=carriage.message.with_tensors([evolve(tensor, remote=place)]))


@frozen
class Ends:
    """The other process, the link to it, and the memory of this end."""

    process: Popen[bytes]
    link: Link
    memory: TransferMemory

    async def free_bytes(self) -> int:
        """Return the free bytes of the other end's memory."""
        async with self.link.ask(GetLoad(), 1) as answer:
            load = await answer.result()
        assert isinstance(load, EngineLoad)
        return load.kv_tokens_used


@asynccontextmanager
async def linked_process(lease_s: float = 30.0, memory_bytes: int = MEMORY_BYTES) -> AsyncIterator[Ends]:
    """Run such a process and a link to it, over which both offer memory."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "tests.rig.transfer_process", str(theirs.fileno()), str(lease_s)]
    process = Popen(command, pass_fds=(theirs.fileno(),))  # noqa: ASYNC220  # it takes a millisecond
    theirs.close()
    memory = TransferMemory(partial(os.urandom, 32), memory_bytes)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(memory.run)
            road = TransferRoad(memory, lease_s)
            link = _link(ours, "here", road)
            nursery.start_soon(_carry, link)
            with trio.fail_after(20):
                while not road.reader.may_offer:  # noqa: ASYNC110  # there is no event of it
                    await trio.sleep(0.01)
            yield Ends(process, link, memory)
            nursery.cancel_scope.cancel()
    finally:
        process.kill()
        process.wait()
        ours.close()


def _link(ours: socket.socket, name: str, road: TransferRoad) -> Link:
    transport = SocketTransport(trio.SocketStream(trio.socket.from_stdlib_socket(ours)))
    peer = Peer(name, serves_max=64, memory=road.reader.offered)

    async def encode(request: Message) -> Message:
        await trio.lowlevel.checkpoint()
        assert isinstance(request, Encode)
        return encoded(request)

    async def load(_: Message) -> Message:
        await trio.lowlevel.checkpoint()
        return EngineLoad(0, 0, road.memory.free_bytes)

    services: Services = {
        ("", Encode): cast("Service", Function(encode)),
        ("", GetLoad): cast("Service", Function(load)),
    }
    return Link(transport, peer, services, road=road)


async def _carry(link: Link) -> None:
    with suppress(PeerLost, PeerViolation):
        await link.run()


async def _serve(descriptor: int, lease_s: float) -> None:
    memory = TransferMemory(partial(os.urandom, 32), MEMORY_BYTES)
    async with trio.open_nursery() as nursery:
        await nursery.start(memory.run)
        await _carry(_link(socket.socket(fileno=descriptor), "there", LyingRoad(memory, lease_s)))
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(partial(_serve, int(sys.argv[1]), float(sys.argv[2])))
