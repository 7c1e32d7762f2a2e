"""Tensors between a node and an engine's process: in memory that both map, and nothing is left of it by anybody."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.engines.host.link_messages import HostStatistics, LinkMessages
from actors.engines.shared_tensors import SHARED_BYTES_MIN, open_tensors
from protocol.errors import BadRequest, DeadlineExceeded, EngineLost, PeerViolation
from protocol.link import codec
from protocol.link.frames import End
from protocol.messages.generation import Generate, Sampling
from protocol.messages.kind import Message
from protocol.messages.media import Encode, Encoded, MediaItem
from protocol.token_ids import TokenIds
from supervisor.links.link import Link
from supervisor.tensors.shared_memory import DESCRIPTOR_BYTES
from tests.rig.links import hand_written
from tests.rig.tensor_host import near_host
from tests.rig.tensors import embeddings, pixels

LARGE = 3 * SHARED_BYTES_MIN
EMBEDDED = 4 * SHARED_BYTES_MIN


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    yield
    gc.collect()
    assert memory_files() == []


def memory_files() -> list[str]:
    """Return the files in memory that this process has open or mapped."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the folder that is being read
            found.append(str(entry.readlink()))
    found += [line for line in Path("/proc/self/maps").read_text().splitlines() if "/memfd:" in line]
    return [each for each in found if "/memfd:" in each]


def item_of(request: Message) -> MediaItem:
    assert isinstance(request, Encode)
    return request.item


async def encode_all(request: Message) -> Message:
    """Answer with embeddings of four times the least that is shared."""
    await trio.sleep(0.01)
    return Encoded(embeddings(item_of(request), EMBEDDED))


async def never(_: Message) -> Message:
    await trio.sleep_forever()
    raise AssertionError


async def ask(link: Link, request: Message) -> Message | None:
    async with link.ask(request, 9) as answer:
        return await answer.result()


# There and back -----------------------------------------------------------------------------


async def test_large_tensors_of_requests_and_results_do_not_go_through_the_socket(autojump_clock: MockClock) -> None:
    received: list[bytes] = []

    async def service(request: Message) -> Message:
        data = item_of(request).data
        assert data.shared is not None
        received.append(bytes(data.data))
        return await encode_all(request)

    async with near_host(service) as near:
        item = pixels(LARGE)
        result = await ask(near.link, Encode("a", item))
        assert result == Encoded(embeddings(item, EMBEDDED))
        assert received == [bytes(item.data.data)]
        assert near.link.traffic.bytes_sent < 4096
        assert near.link.traffic.bytes_received < 4096
        del result
        await near.check_nothing_held()


async def test_hundreds_of_requests_leave_no_descriptor_and_no_byte(autojump_clock: MockClock) -> None:
    async with near_host(encode_all) as near:

        async def asks(number: int) -> None:
            item = pixels(LARGE + 3 * number, seed=number)
            assert await ask(near.link, Encode("a", item)) == Encoded(embeddings(item, EMBEDDED))

        for _ in range(5):
            async with trio.open_nursery() as nursery:
                for number in range(50):
                    nursery.start_soon(asks, number)
        await near.check_nothing_held()


async def test_what_one_engine_has_shared_is_passed_on_to_another_without_being_copied(
    autojump_clock: MockClock,
) -> None:
    places: list[Any] = []

    async def service(request: Message) -> Message:
        places.extend(tensor.shared for tensor in request.tensors)
        raise BadRequest("enough")

    async with near_host(encode_all) as encoder, near_host(service) as language:
        encoded = await ask(encoder.link, Encode("a", pixels(LARGE)))
        assert isinstance(encoded, Encoded)
        mine = encoded.item.data.shared
        assert mine is not None
        assert mine.process == os.getpid()
        with pytest.raises(BadRequest):
            await ask(language.link, Generate("a", TokenIds.of([1]), Sampling(1), media=(encoded.item,)))
        assert (places[0].name, places[0].inode) == (mine.name, mine.inode)
        assert language.memory.statistics().taken_bytes == 0
        assert encoder.memory.statistics().mappings == 1
        del encoded
        await encoder.check_nothing_held()
        await language.check_nothing_held()


# Whoever leaves or dies ---------------------------------------------------------------------


async def test_a_region_is_there_until_its_call_is_over(autojump_clock: MockClock) -> None:
    async with near_host(never) as near:
        async with near.link.ask(Encode("a", pixels(LARGE)), 9):
            await trio.sleep(1)
            held = near.memory.statistics()
            assert (held.regions, held.region_bytes, held.taken_bytes) == (1, LARGE, DESCRIPTOR_BYTES)
            assert near.host.messages.statistics() == HostStatistics(1, LARGE, 0, 0)
        await near.check_nothing_held()


async def test_an_asker_that_leaves_closes_its_region_at_once_though_its_engine_takes_its_time(
    autojump_clock: MockClock,
) -> None:
    async with near_host(never) as near:
        number, _ = near.link.open(Encode("a", pixels(LARGE)), 9)
        await wait_all_tasks_blocked()
        near.host.deaf = True
        near.link.cancel(number)
        await wait_all_tasks_blocked()
        held = near.memory.statistics()
        assert (held.regions, held.taken_bytes) == (0, DESCRIPTOR_BYTES)  # the engine may have it mapped
        near.host.deaf = False
        await trio.sleep(2)
        await near.check_nothing_held()


async def test_an_engine_that_never_comes_costs_the_lease(autojump_clock: MockClock) -> None:
    async with near_host(never, lease_s=30) as near:
        near.host.deaf = True
        _, answer = near.link.open(Encode("a", pixels(LARGE)), 9)
        await trio.sleep(29)
        assert near.memory.statistics().regions == 1
        await trio.sleep(2)
        assert near.memory.statistics().regions == 0
        near.host.deaf = False  # too late: it is an error of this call, and of no other
        await trio.sleep(2)
        assert isinstance(answer.failure, DeadlineExceeded)
        await near.check_nothing_held()


async def test_the_end_of_a_link_ends_its_regions(autojump_clock: MockClock) -> None:
    async with near_host(never) as near:
        _, answer = near.link.open(Encode("a", pixels(LARGE)), 9)
        await trio.sleep(1)
        near.transport.cut()
        await trio.sleep(1)
        assert isinstance(answer.failure, EngineLost)
        assert near.memory.statistics().regions == near.memory.statistics().taken_bytes == 0


async def test_a_node_that_never_takes_a_result_costs_its_engine_the_lease(autojump_clock: MockClock) -> None:
    async with near_host(encode_all, lease_s=30) as near:
        near.link.open(Encode("a", pixels(LARGE)), 9)
        near.transport.stall(1000)
        await trio.sleep(29)
        assert near.host.messages.statistics() == HostStatistics(0, 0, 0, 0)  # not even the request has arrived
    async with near_host(encode_all, lease_s=30) as near:
        near.link.open(Encode("a", pixels(LARGE)), 9)
        await wait_all_tasks_blocked()
        near.transport.stall(1000)
        await trio.sleep(29)
        assert near.host.messages.statistics().regions == 1
        await trio.sleep(2)
        assert near.host.messages.statistics() == HostStatistics()


async def test_a_result_that_crosses_a_cancel_is_freed_by_it(autojump_clock: MockClock) -> None:
    async with near_host(encode_all) as near:
        for delay_s in (0.0, 0.005, 0.01, 0.02):
            with trio.move_on_after(delay_s):
                await ask(near.link, Encode("a", pixels(LARGE)))
            await trio.sleep(1)
            await near.check_nothing_held()


async def test_an_engine_that_has_been_left_shares_no_result(autojump_clock: MockClock) -> None:
    async def stubborn(request: Message) -> Message:
        with trio.CancelScope(shield=True):
            result = await encode_all(request)
        assert result is not None
        return result

    async with near_host(stubborn) as near:
        number, _ = near.link.open(Encode("a", pixels(LARGE)), 9)
        await wait_all_tasks_blocked()
        near.link.cancel(number)
        await trio.sleep(1)
        await near.check_nothing_held()


# Limits -------------------------------------------------------------------------------------


async def test_requests_wait_for_shared_memory_and_leave_while_they_wait(autojump_clock: MockClock) -> None:
    async def slow(request: Message) -> Message:
        await trio.sleep(10)
        return await encode_all(request)

    async with near_host(slow, bytes_max=2 * DESCRIPTOR_BYTES) as near:

        async def asks() -> None:
            await ask(near.link, Encode("a", pixels(LARGE)))

        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(asks)
            await wait_all_tasks_blocked()
            with trio.move_on_after(5):
                await asks()
            await wait_all_tasks_blocked()
            held = near.memory.statistics()
            assert (held.regions, held.waiting, held.taken_bytes) == (2, 4, 2 * DESCRIPTOR_BYTES)
        assert 30 <= trio.current_time() < 31
        await near.check_nothing_held()


async def test_what_could_never_be_shared_is_attached(autojump_clock: MockClock) -> None:
    shared: list[bool] = []

    async def service(request: Message) -> Message:
        shared.append(item_of(request).data.shared is not None)
        return await encode_all(request)

    async with near_host(service, bytes_max=1, host_bytes_max=1) as near:
        result = await ask(near.link, Encode("a", pixels(LARGE)))
        assert result == Encoded(embeddings(pixels(LARGE), EMBEDDED))
        assert shared == [False]
        assert near.link.traffic.bytes_received > EMBEDDED
        await near.check_nothing_held()


async def test_copying_lets_other_tasks_run_between_pieces(autojump_clock: MockClock) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with near_host(never) as near, trio.open_nursery() as nursery:
        near.link.open(Encode("a", pixels(24 * DESCRIPTOR_BYTES)), 9)
        nursery.start_soon(count)
        while not near.host.messages.statistics().mappings:
            await trio.lowlevel.checkpoint()
        assert turns >= 24
        nursery.cancel_scope.cancel()


# Lies ---------------------------------------------------------------------------------------


async def test_a_result_that_is_not_there_is_an_error_of_its_call_alone(autojump_clock: MockClock) -> None:
    class Closed(LinkMessages):
        def _shared(self, stream: int, result: Message) -> Message:
            shared = super()._shared(stream, result)
            self.taken(stream)
            return shared

    async with near_host(encode_all) as near:
        true = near.host.messages
        near.host.messages = Closed(near.host.peer, true.call_later)
        with pytest.raises(DeadlineExceeded, match="not there any more"):
            await ask(near.link, Encode("a", pixels(LARGE)))
        near.host.messages = true
        assert isinstance(await ask(near.link, Encode("a", pixels(LARGE))), Encoded)
        await near.check_nothing_held()


async def test_another_node_may_not_share_memory(autojump_clock: MockClock) -> None:
    async with near_host(never) as near, near.memory.copied([embeddings(pixels(), LARGE).data]) as copied:
        (described,) = copied.tensors
        result = Encoded(evolve(embeddings(pixels(), LARGE), data=described))
        async with hand_written() as other:
            other.link.open(Encode("a", pixels()), 9)
            await other.receive()
            await other.send(End(1, codec.encode(result)))
            assert isinstance(other.ended, PeerViolation)
        with pytest.raises(PeerViolation):
            codec.decode(codec.encode(result))
        _, (mapping,) = open_tensors(codec.decode(codec.encode(result), shared=True).tensors)
        os.close(mapping.descriptor)
