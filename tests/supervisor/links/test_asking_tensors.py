"""Requests and results with tensors over a link: whole or not at all, and nothing is kept of what cannot be."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock, wait_all_tasks_blocked

from protocol.errors import AskerLeft, LinkLost, Overloaded, PeerViolation, TooLarge
from protocol.link import attachments, codec, peer
from protocol.link.attachments import PIECE_BYTES, WINDOW_BYTES
from protocol.link.frames import VERSION, End, Frame, Hello, Item, Open, ReplyData, RequestData, WindowUpdate
from protocol.link.peer import Peer, PeerStatistics
from protocol.messages.engine import GetLoad
from protocol.messages.generation import Generate, Sampling
from protocol.messages.kind import Message
from protocol.messages.media import Encode, Encoded, MediaForm
from protocol.tensors import Dtype, Tensor
from protocol.token_ids import TokenIds
from supervisor.links.encoding import BODY_BYTES_MAX
from supervisor.links.heartbeat import Heartbeat
from supervisor.links.link import Link
from tests.rig.calls import AnyAnswer, AnyCall, mailbox
from tests.rig.links import Ends, HandWritten, Service, hand_written, linked, never_answer, serve
from tests.rig.network import sim_pair
from tests.rig.nodes import until
from tests.rig.tensors import bytes_of, embeddings, pixels
from tests.system.simulator import simulate

ITEM = pixels()
ENCODED = embeddings(ITEM)
DATA = bytes(ENCODED.data.data)


def encoder(size: int) -> Service:
    """Return a service that answers each item with `size` bytes of embeddings."""

    async def service(call: AnyCall, replies: AnyAnswer) -> None:
        await trio.sleep(0.001)
        replies.end(Encoded(embeddings(call.request.item, size)))

    return service


async def encode(link: Link, size: int = 12) -> Message | None:
    async with link.ask(Encode("a", pixels(size)), 0) as answer:
        return await answer.result()


async def check_nothing_held(ends: Ends) -> None:
    await trio.sleep(20)
    ends.check_at_rest()
    assert ends.asker.peer.statistics() == ends.server.peer.statistics() == PeerStatistics()


# Whole --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [12, 3 * PIECE_BYTES, 3 * (WINDOW_BYTES + 4)])
async def test_a_request_and_its_result_arrive_with_all_of_their_bytes(size: int, autojump_clock: MockClock) -> None:
    received: list[bytes] = []

    async def service(call: AnyCall, replies: AnyAnswer) -> None:
        received.append(bytes(call.request.item.data.data))
        replies.end(Encoded(embeddings(call.request.item, size)))

    async with linked(service, request=Encode) as ends:
        assert await encode(ends.asker, size) == Encoded(embeddings(pixels(size), size))
        assert received == [bytes_of(size)]
        await check_nothing_held(ends)


@pytest.mark.parametrize("seed", range(8))
def test_results_of_many_requests_keep_their_bytes_apart_and_leave_at_any_moment(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attachments, "WINDOW_BYTES", 350)
    monkeypatch.setattr(peer, "PIECE_BYTES", 100)

    async def scenario(rng: random.Random) -> None:
        async def one(link: Link, number: int) -> None:
            await trio.sleep(rng.random())
            item = pixels(3 * rng.randrange(1, 300), seed=number)
            with trio.move_on_after(rng.expovariate(0.5)):
                async with link.ask(Encode("a", item), 0) as answer:
                    assert await answer.result() == Encoded(embeddings(item, 2000))

        async with linked(encoder(2000), request=Encode, rng=rng, streams=8, inbox_size=8) as ends:
            async with trio.open_nursery() as nursery:
                for number in range(8):
                    nursery.start_soon(one, ends.asker, number)
            await check_nothing_held(ends)
            assert ends.ended == {}

    simulate(scenario, seed)


# Leaving ------------------------------------------------------------------------------------


async def test_a_result_that_crosses_a_cancel_is_dropped_and_the_link_lives() -> None:
    async with encoding() as (other, answer):
        other.link.cancel(1)
        await other.send(Item(1, b"", 0, len(DATA)), ReplyData(1, DATA), End(1, codec.encode(Encoded(ENCODED))))
        assert other.ended is None
        assert answer.over.is_set()
        assert other.link.statistics().streams_asked == 0


# Waiting for room -------------------------------------------------------------------------

LARGE = 150_000  # bytes of pixels, more than the simulated network holds and two of which fit no link of these tests


@asynccontextmanager
async def standing_still(**fields: Any) -> AsyncIterator[Ends]:
    """A link with room for one request or result with `LARGE` tensors, on which nothing arrives for ten seconds."""
    async with linked(encoder(8), request=Encode, attached_bytes_max=200_000, **fields) as ends:
        ends.near.mute(10)
        yield ends


@asynccontextmanager
async def asking_one_with_little_room() -> AsyncIterator[HandWritten]:
    """A link whose other end, written by hand, has room for one request with `LARGE` tensors."""
    near, far = sim_pair()
    other = HandWritten(Link(near, Peer("here", serves_max=2)), far)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(other.run)
        await other.send(Hello(VERSION, "there", 8, attached_bytes_max=200_000))
        yield other
        nursery.cancel_scope.cancel()


async def test_requests_wait_for_room_in_the_order_in_which_they_came(autojump_clock: MockClock) -> None:
    async with asking_one_with_little_room() as other:
        for number, size in enumerate((LARGE, LARGE, 51_000, LARGE)):
            other.link.open(Encode("a", pixels(size)), number)
            await wait_all_tasks_blocked()
        assert other.link.peer.statistics().waiting == 3
        assert other.link.statistics().answers == 4
        assert other.link.traffic.waits == 3
        opened: list[int] = []
        while len(opened) < 4:
            frames = await other.receive()
            opened += [frame.credit for frame in frames if isinstance(frame, Open)]
            received = sum(len(frame.data) for frame in frames if isinstance(frame, RequestData))
            await other.send(*[WindowUpdate(received)] * bool(received))
        assert opened == [0, 1, 2, 3]


async def test_a_request_that_may_not_wait_for_a_stream_waits_for_room_within_its_answer(
    autojump_clock: MockClock,
) -> None:
    async with standing_still() as ends:
        answers = [ends.asker.open(Encode("a", pixels(LARGE)), 0)[1] for _ in range(3)]
        for answer in answers:
            assert isinstance(await answer.result(), Encoded)
        await check_nothing_held(ends)


async def test_a_request_without_tensors_does_not_wait_for_those_that_wait_for_room(autojump_clock: MockClock) -> None:
    async with asking_one_with_little_room() as other:
        for _ in range(2):
            other.link.open(Encode("a", pixels(LARGE)), 0)
        await wait_all_tasks_blocked()
        assert other.link.peer.statistics().waiting == 1
        other.link.open(GetLoad(), 7)
        opened: list[int] = []
        while 7 not in opened:
            opened += [frame.credit for frame in await other.receive() if isinstance(frame, Open)]
        assert opened == [0, 7]


async def test_an_asker_that_leaves_while_it_waits_for_room_lets_the_next_one_pass(autojump_clock: MockClock) -> None:
    async with standing_still(streams=9) as ends:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(encode, ends.asker, LARGE)
            await wait_all_tasks_blocked()
            number, answer = ends.asker.open(Encode("a", pixels(LARGE)), 0)
            await wait_all_tasks_blocked()
            nursery.start_soon(encode, ends.asker, 30_000)  # fits beside the first
            await wait_all_tasks_blocked()
            assert ends.asker.peer.statistics().waiting == 2
            ends.asker.cancel(number)
            ends.asker.cancel(number)
            assert isinstance(answer.failure, AskerLeft)
            await wait_all_tasks_blocked()
            assert ends.asker.peer.statistics().waiting == 0
        await check_nothing_held(ends)


async def test_a_result_behind_a_request_that_leaves_is_sent_though_nothing_else_happens() -> None:
    near, far = sim_pair(room=1 << 20)
    address, inbox = mailbox(1)
    other = HandWritten(Link(near, Peer("here", serves_max=2), {("", Encode): address}), far)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(other.run)
        nursery.start_soon(serve, inbox, encoder(90_000))
        await other.send(Hello(VERSION, "there", 8, attached_bytes_max=400_000))
        other.link.open(Encode("a", pixels(300_000)), 0)  # more than the window, which stays full
        await wait_all_tasks_blocked()
        number, _ = other.link.open(Encode("a", pixels(150_000)), 0)
        await wait_all_tasks_blocked()
        await other.send(Open(1, codec.encode(Encode("a", ITEM)), 0, attached=12), RequestData(1, bytes(bytes_of(12))))
        await until(lambda: other.link.peer.statistics().waiting == 2)
        await other.receive()
        other.link.cancel(number)
        await wait_all_tasks_blocked()
        with trio.fail_after(5):
            assert (await other.receive())[0] == Item(1, b"", 0, 90_000)
        nursery.cancel_scope.cancel()


async def test_a_request_that_waits_for_room_has_a_stream_already(autojump_clock: MockClock) -> None:
    async with standing_still(streams=2) as ends:
        for _ in range(2):
            ends.asker.open(Encode("a", pixels(LARGE)), 0)
        with pytest.raises(Overloaded, match="2 streams are open"):
            ends.asker.open(Encode("a", ITEM), 0)
        with trio.move_on_after(1):
            await encode(ends.asker)
            pytest.fail("there was no stream")
        assert await encode(ends.asker) == Encoded(ENCODED)
        await check_nothing_held(ends)


async def test_a_request_that_waits_for_room_fails_with_its_link(autojump_clock: MockClock) -> None:
    async with standing_still() as ends:
        answers = [ends.asker.open(Encode("a", pixels(LARGE)), 0)[1] for _ in range(2)]
        await wait_all_tasks_blocked()
        ends.near.cut()
        await wait_all_tasks_blocked()
        assert [type(answer.failure) for answer in answers] == [LinkLost, LinkLost]


async def test_a_request_that_waits_for_room_fails_when_the_other_end_stands_still(autojump_clock: MockClock) -> None:
    heartbeat = Heartbeat(silent_s=3, stalled_s=15)
    async with standing_still(heartbeat=heartbeat, acknowledges=True) as ends:
        ends.near.stall(10)
        answers = [ends.asker.open(Encode("a", pixels(LARGE)), 0)[1] for _ in range(2)]
        await trio.sleep(5)
        assert [type(answer.failure) for answer in answers] == [LinkLost, LinkLost]
        await trio.sleep(20)
        ends.check_at_rest()
        assert ends.asker.peer.statistics().sending_bytes == 0


async def test_whoever_leaves_after_the_other_end_stood_still_cancels_its_request(autojump_clock: MockClock) -> None:
    heartbeat = Heartbeat(silent_s=3, stalled_s=15)
    async with linked(never_answer, request=Encode, heartbeat=heartbeat, acknowledges=True) as ends:
        async with ends.asker.ask(Encode("a", ITEM), 9) as answer:
            await wait_all_tasks_blocked()
            ends.near.stall(12)
            with pytest.raises(LinkLost):
                await answer.result()
            await trio.sleep(10)
            assert ends.server.statistics().calls == 1
        await trio.sleep(5)
        ends.check_at_rest()


async def test_the_deadline_of_a_request_is_counted_while_it_waits_for_room(autojump_clock: MockClock) -> None:
    async with standing_still() as ends:
        ends.asker.open(Encode("a", pixels(LARGE)), 0)
        await wait_all_tasks_blocked()
        with trio.move_on_after(5) as scope:
            await encode(ends.asker, LARGE)
        assert scope.cancelled_caught
        assert trio.current_time() == 5
        await check_nothing_held(ends)


async def test_results_wait_for_room_and_all_of_them_come(autojump_clock: MockClock) -> None:
    async with linked(encoder(LARGE), request=Encode, streams=9, inbox_size=9, attached_bytes_max=200_000) as ends:
        ends.far.mute(10)
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(encode, ends.asker)
            await trio.sleep(5)
            assert ends.server.peer.statistics().waiting == 4
        await check_nothing_held(ends)


async def test_a_request_that_no_link_takes_fails_as_too_large(autojump_clock: MockClock) -> None:
    async with linked(encoder(8), request=Encode, attached_bytes_max=11) as ends:
        with pytest.raises(TooLarge, match="12 bytes are attached; the limit of a link is 11"):
            await encode(ends.asker)
        with pytest.raises(TooLarge, match="the limit of a link is"):
            async with ends.asker.ask(Encode("x" * BODY_BYTES_MAX, ITEM), 0) as answer:
                await answer.result()
        await check_nothing_held(ends)


# What cannot be sent ------------------------------------------------------------------------


# Violations ---------------------------------------------------------------------------------


@asynccontextmanager
async def encoding(request: Message | None = None) -> AsyncIterator[tuple[HandWritten, AnyAnswer]]:
    """A link that has asked for the embeddings of an item, whose other end is written by hand."""
    async with hand_written() as other:
        _, answer = other.link.open(request or Encode("a", ITEM), 9)
        await other.receive()
        yield other, answer


def ended(encoded: Encoded) -> End:
    return End(1, codec.encode(encoded))


TENSORS = (Item(1, b"", 0, len(DATA)), ReplyData(1, DATA))


@pytest.mark.parametrize(
    ("sent", "wrong"),
    [
        ((*TENSORS, TENSORS[0]), "8 bytes of a result, which is a Encoded"),
        ((ended(Encoded(ENCODED)),), "tensors of 8 bytes with 0 attached"),
        ((*TENSORS, ended(Encoded(evolve(ENCODED, digest="cd" * 32)))), "another item was encoded"),
        ((*TENSORS, ended(Encoded(evolve(ENCODED, tokens=2)))), "embeddings of 2 tokens are a float32 tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_tensors_that_cannot_be_of_a_result_are_a_violation(sent: tuple[Frame, ...], wrong: str) -> None:
    async with encoding() as (other, _):
        await other.send(*sent)
        assert isinstance(other.ended, PeerViolation)
        assert wrong in str(other.ended)


WRONG = (
    evolve(ITEM, digest="xy" * 32),
    evolve(ITEM, grid=(1, 2**40, 2)),
    evolve(ITEM, form=MediaForm.EMBEDDINGS),
    evolve(ITEM, data=Tensor(Dtype.UINT8, (1, 1, 3, 4), bytes_of(12))),
    evolve(ENCODED, tokens=2),
)


@pytest.mark.parametrize("item", WRONG, ids=repr)
async def test_a_request_whose_tensors_contradict_it_ends_the_link_before_their_bytes_come(item: Any) -> None:
    requests = Encode("a", item), Generate("a", TokenIds.of([1]), Sampling(1), media=(ITEM.place, item))
    for request in requests:
        async with hand_written(services={("", type(request)): mailbox(1)[0]}) as other:
            size = len(item.data.data)
            await other.send(Open(1, codec.encode(request), 9, attached=size))
            assert isinstance(other.ended, PeerViolation)
            assert other.link.peer.statistics().receiving_bytes == 0
