"""Results whose tensors are in the other end's memory: read in a task, in virtual time, by a reader of the test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trio
from attrs import define, evolve, field
from trio.testing import MockClock

from actors.kit.calls import Function
from protocol.errors import AskerLeft, DeadlineExceeded, LinkLost
from protocol.link.frames import OfferedMemory
from protocol.link.peer import Peer
from protocol.messages.kind import Message
from protocol.messages.media import Encode, Encoded
from protocol.tensors import MemoryRange
from supervisor.links.link import Link
from supervisor.links.tensor_road import Carriage
from tests.rig.links import Ends
from tests.rig.network import sim_pair
from tests.rig.tensors import embeddings, pixels

STORE: dict[bytes, memoryview] = {}  # the offered bytes of both ends, by stamp
SIZE = 120_000


@define(eq=False)
class Reader:
    """A reader that takes a second."""

    offered: OfferedMemory = OfferedMemory(b"agent", 4096, 2**20, bytes(16))
    fails: bool = False
    may_offer: bool = False

    async def run(self, _: OfferedMemory, on_readable: Callable[[], None]) -> None:
        on_readable()
        await trio.sleep_forever()

    def offer(self) -> None:
        self.may_offer = True

    def check(self, message: Message) -> None:
        pass

    async def read(self, message: Message) -> Message:
        await trio.sleep(1)
        if self.fails:
            raise DeadlineExceeded("gone")
        (tensor,) = message.tensors
        assert tensor.remote is not None
        return message.with_tensors([evolve(tensor, data=STORE[tensor.remote.stamp], remote=None)])


def free(stamp: bytes) -> None:
    STORE.pop(stamp, None)


@define(eq=False)
class Road:
    """A road that offers all tensors, and counts what is offered now."""

    lease_s: float = 30.0
    shares: bool = False
    reader: Reader = field(factory=Reader)

    @asynccontextmanager
    async def carry(self, message: Message) -> AsyncIterator[Carriage]:
        await trio.lowlevel.checkpoint()
        (tensor,) = message.tensors
        stamp = len(STORE).to_bytes(16, "big")
        STORE[stamp] = tensor.data
        remote = MemoryRange(0, len(tensor.data), stamp)
        try:
            away = message.with_tensors([evolve(tensor, data=memoryview(b""), remote=remote)])
            yield Carriage(away, lambda: free(stamp))
        finally:
            free(stamp)

    def take(self, message: Message) -> Message:
        return message


async def encode(request: Message) -> Message:
    await trio.sleep(0.1)
    assert isinstance(request, Encode)
    assert len(request.item.data.data) == SIZE
    return Encoded(embeddings(request.item, SIZE))


@asynccontextmanager
async def linked(asking: Reader | None = None) -> AsyncIterator[Ends]:
    STORE.clear()
    near, far = sim_pair()
    links = []
    for name, transport, reader in (("asker", near, asking or Reader()), ("server", far, Reader())):
        peer = Peer(name, serves_max=4, memory=reader.offered)
        links.append(Link(transport, peer, {("", Encode): Function(encode)}, road=Road(reader=reader)))
    ends = Ends(links[0], links[1], near, far)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ends.run, "asker", ends.asker)
        nursery.start_soon(ends.run, "server", ends.server)
        await ends.asker.wait_ready()
        await ends.server.wait_ready()
        yield ends
        await trio.sleep(2)
        assert STORE == {}
        ends.check_at_rest()
        nursery.cancel_scope.cancel()


async def test_a_request_and_its_result_are_read_and_freed_at_once(autojump_clock: MockClock) -> None:
    async with linked() as ends, ends.asker.ask(Encode("a", pixels(SIZE)), 0) as answer:
        assert await answer.result() == Encoded(embeddings(pixels(SIZE), SIZE))
        assert trio.current_time() == pytest.approx(2.1)
        await trio.sleep(0.01)
        assert STORE == {}


async def test_a_failed_read_fails_the_call(autojump_clock: MockClock) -> None:
    async with linked(Reader(fails=True)) as ends:
        with pytest.raises(DeadlineExceeded, match="gone"):
            async with ends.asker.ask(Encode("a", pixels(SIZE)), 0) as answer:
                await answer.result()


@pytest.mark.parametrize("wait_s", [0.5, 1.05, 1.5])
async def test_leaving_frees_all_at_both_ends(wait_s: float, autojump_clock: MockClock) -> None:
    async with linked() as ends:
        with trio.move_on_after(wait_s):
            async with ends.asker.ask(Encode("a", pixels(SIZE)), 0) as answer:
                await answer.result()
        await answer.over.wait()
        assert isinstance(answer.failure, AskerLeft | DeadlineExceeded)


async def test_the_end_of_the_link_fails_a_read(autojump_clock: MockClock) -> None:
    async with linked() as ends:
        with pytest.raises(LinkLost):
            async with ends.asker.ask(Encode("a", pixels(SIZE)), 0) as answer:
                await trio.sleep(1.5)
                ends.near.cut()
                await answer.result()
