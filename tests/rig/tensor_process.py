"""A process with the messages of an engine's host, for tests: `python -m tests.rig.tensor_process DESCRIPTOR ROAD`.

It answers each `Encode` by embeddings with the bytes of the pixels, and counts what it holds in `EngineLoad`. The id of
a request may ask for something else: to wait for ever, or to die in the middle.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from subprocess import Popen

import trio
from attrs import evolve, frozen

from actors.engines.host.link_messages import LinkMessages
from actors.engines.shared_tensors import new_region
from protocol.errors import AskerLeft, EngineLost, EngineRefused, PeerLost, RequestError
from protocol.link.frames import Cancel, Frame, Open
from protocol.link.peer import Peer
from protocol.messages.engine import EngineLoad, GetLoad
from protocol.messages.kind import Message
from protocol.messages.media import Encode, Encoded, MediaForm, MediaItem
from protocol.tensors import Dtype, Tensor
from supervisor.links.link import Link
from supervisor.links.tensor_road import Attachments
from supervisor.links.transport import SocketTransport
from supervisor.tensors.shared_memory import SharedMemory
from supervisor.tensors.shared_road import SharedMemoryRoad

READ_BYTES = 256 * 1024
WAITS, DIES = "waits", "dies"
SHARE, SHARED, ATTACHED = "--share", "shared", "attached"


def encoded(item: MediaItem) -> Encoded:
    """Return the result for an item: its own bytes, with two elements less where they are no multiple of four."""
    data = item.data.data[: len(item.data.data) // 4 * 4]
    tensor = Tensor(Dtype.FLOAT32, (1, len(data) // 4), data)
    return Encoded(evolve(item, form=MediaForm.EMBEDDINGS, data=tensor))


class _Host:
    def __init__(self, link: socket.socket, road: str) -> None:
        self.peer = Peer("host", serves_max=64)
        later = asyncio.get_running_loop().call_later if road == SHARED else None
        self.messages = LinkMessages(self.peer, later, lease_s=0.5)
        self.link = link
        self.waiting: set[int] = set()

    async def serve(self) -> None:
        reader, self.writer = await asyncio.open_connection(sock=self.link)
        self.flush()
        while data := await reader.read(READ_BYTES):
            for frame in self.peer.receive_data(data):
                self.received(frame)
            self.flush()
            await self.writer.drain()

    def received(self, frame: Frame) -> None:
        match frame:
            case Open():
                try:
                    self.answer(frame.stream, self.messages.request(frame))
                except RequestError as error:
                    self.messages.fail(frame.stream, error)
            case Cancel():
                self.messages.taken(frame.stream)
                if frame.stream in self.waiting:
                    self.waiting.remove(frame.stream)
                    self.messages.fail(frame.stream, AskerLeft("the asker left"))
            case _:
                pass

    def answer(self, stream: int, request: Message) -> None:
        match request:
            case Encode(id="waits"):
                self.waiting.add(stream)
            case Encode(id="dies"):
                os.kill(os.getpid(), signal.SIGKILL)
            case Encode():
                self.messages.end(stream, encoded(request.item))
            case GetLoad():
                held = self.messages.statistics()
                self.messages.end(
                    stream, EngineLoad(held.mappings, held.regions, held.mapped_bytes + held.region_bytes)
                )
            case _:
                raise EngineRefused("no such request")

    def flush(self) -> None:
        while data := self.peer.data_to_send():
            self.writer.write(data)


@frozen
class HostProcess:
    """The process, the link to it, and the memory of this end."""

    process: Popen[bytes]
    link: Link
    memory: SharedMemory


@asynccontextmanager
async def host_process(
    bytes_max: int = 512 * 1024 * 1024, lease_s: float = 0.5, road: str = SHARED
) -> AsyncIterator[HostProcess]:
    """Run such a process and a link to it; the process is killed at the end, whatever happens."""
    ours, theirs = socket.socketpair()
    memory = SharedMemory(bytes_max)
    with _running("tests.rig.tensor_process", str(theirs.fileno()), road, passed=theirs.fileno()) as process:
        theirs.close()
        transport = SocketTransport(trio.SocketStream(trio.socket.from_stdlib_socket(ours)))
        taken = SharedMemoryRoad(memory, lease_s, process.pid) if road == SHARED else Attachments()
        link = Link(transport, Peer("node", serves_max=0), lost_error=EngineLost, road=taken)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_carry, link)
            nursery.start_soon(memory.run)
            await link.wait_ready()
            yield HostProcess(process, link, memory)
            nursery.cancel_scope.cancel()
        ours.close()


@contextmanager
def sharing_process() -> Iterator[tuple[Popen[bytes], int, str, int]]:
    """Run a process that has shared 100 bytes: yield it, and the descriptor, the name and the inode of the region."""
    with _running("tests.rig.tensor_process", SHARE) as process:
        assert process.stdout is not None
        descriptor, name, inode = process.stdout.readline().decode().split()
        yield process, int(descriptor), name, int(inode)


@contextmanager
def _running(module: str, *arguments: str, passed: int | None = None) -> Iterator[Popen[bytes]]:
    descriptors = () if passed is None else (passed,)
    process = Popen([sys.executable, "-m", module, *arguments], pass_fds=descriptors, stdout=-1)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


async def _carry(link: Link) -> None:
    with suppress(PeerLost):
        await link.run()


def _share() -> None:
    region = new_region()
    for _ in region.write([Tensor(Dtype.UINT8, (100,), memoryview(bytes(range(100))))]):
        pass
    sys.stdout.write(f"{region.descriptor} {region.name} {region.inode}\n")
    sys.stdout.flush()
    signal.pause()


async def _serve(descriptor: int, road: str) -> None:
    await _Host(socket.socket(fileno=descriptor), road).serve()


if __name__ == "__main__":
    _share() if sys.argv[1] == SHARE else asyncio.run(_serve(int(sys.argv[1]), sys.argv[2]))
