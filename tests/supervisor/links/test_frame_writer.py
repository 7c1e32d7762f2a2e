"""The writer of a link: few and whole messages, of limited size, to an end that reads them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from protocol.errors import LinkLost, PeerViolation
from protocol.link import codec
from protocol.link.frames import STEP_TOKENS_MAX, End, Item, Open, Step
from protocol.link.peer import MESSAGE_BYTES_MAX
from protocol.messages.engine import Done
from protocol.messages.generation import Embedded, Logprob, Started, Tokens
from protocol.messages.operations import FlushCache
from protocol.tensors import Dtype, Tensor
from supervisor.links.transport import Transport
from tests.rig.calls import AnyAnswer, mailbox
from tests.rig.fake_engine import generate
from tests.rig.links import HandWritten, hand_written
from tests.rig.network import SimTransport


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> dict[Transport, list[bytes]]:
    """Record what is written to each transport, message by message."""
    written: dict[Transport, list[bytes]] = defaultdict(list)
    send_all = SimTransport.send_all

    async def record(self: SimTransport, data: bytes) -> None:
        written[self].append(bytes(data))
        await send_all(self, data)

    monkeypatch.setattr(SimTransport, "send_all", record)
    return written


async def test_all_that_is_queued_leaves_as_one_message(
    messages: dict[Transport, list[bytes]], autojump_clock: MockClock
) -> None:
    async with hand_written() as other:
        for _ in range(5):
            other.link.open(FlushCache(), 1)
        assert [type(frame) for frame in await other.receive()] == [Open] * 5
        assert len(messages[other.link.transport]) == 2, "its Hello, and one more"


async def test_no_message_is_longer_than_it_may_be_and_a_longer_frame_arrives_whole(
    messages: dict[Transport, list[bytes]], autojump_clock: MockClock
) -> None:
    requests = [generate(str(number), prompt=1_500_000 + number) for number in range(3)]
    async with hand_written(room=2**20) as other:
        for request in requests:
            other.link.open(request, 1)
        received: list[Any] = []
        while len(received) < len(requests):
            received += await other.receive()
        assert [codec.decode(frame.body) for frame in received] == requests
        sizes = [len(message) for message in messages[other.link.transport]]
        assert max(sizes) == MESSAGE_BYTES_MAX
        assert len(sizes) >= 5
        assert other.link.statistics().queued_bytes == 0


async def test_an_end_that_does_not_read_loses_its_link_and_blocks_no_sender(autojump_clock: MockClock) -> None:
    async with hand_written(queued_bytes_max=20_000) as other:
        answers = []
        with pytest.raises(LinkLost):
            for number in range(8):
                answers.append(other.link.open(generate(str(number), prompt=4000), 1)[1])
                await wait_all_tasks_blocked()
        assert isinstance(other.ended, PeerViolation)
        assert "unread" in str(other.ended)
        for answer in answers:
            with pytest.raises(LinkLost):
                await answer.result()


# Tokens, which are gathered ---------------------------------------------------------------


@asynccontextmanager
async def asked(streams: int, *, takes_steps: bool = True) -> AsyncIterator[tuple[HandWritten, list[AnyAnswer]]]:
    """An end of a link that was asked for so many answers, and those answers."""
    address, inbox = mailbox(streams)
    async with hand_written(services={("", FlushCache): address}, takes_steps=takes_steps) as other:
        answers = []
        for stream in range(1, streams + 1):
            await other.send(Open(stream, codec.encode(FlushCache()), 1000))
            answers.append((await inbox.receive()).answer)
            await wait_all_tasks_blocked()
        with trio.fail_after(1):
            yield other, answers


def item(stream: int, reply: Started | Tokens) -> Item:
    return Item(stream, codec.encode(reply), codec.units_of(reply))


async def test_the_tokens_of_a_turn_leave_as_one_step_between_the_frames_around_them(
    autojump_clock: MockClock,
) -> None:
    async with asked(2) as (other, (first, second)):
        first.put(Tokens((1,)))
        second.put(Started(4), 0)
        first.put(Tokens((2, 3)), 2)
        second.put(Tokens((7,)))
        first.put(Tokens((4,)))
        second.end(Done())
        first.put(Tokens((5,)))
        await wait_all_tasks_blocked()
        assert await other.receive() == [
            Step([1], [1], [1], [], []),
            item(2, Started(4)),
            Step([1, 2, 1, 1], [2, 1, 1, 1], [2, 3, 7, 4, 5], [], []),
            End(2, codec.encode(Done())),
        ]


async def test_a_token_leaves_without_any_other_frame(autojump_clock: MockClock) -> None:
    async with asked(1) as (other, (answer,)):
        for token in range(3):
            answer.put(Tokens((token,)))
            assert await other.receive() == [Step([1], [1], [token], [], [])]


async def test_a_longer_run_of_tokens_leaves_in_several_steps(autojump_clock: MockClock) -> None:
    async with asked(1) as (other, (answer,)):
        for token in range(STEP_TOKENS_MAX + 1):
            answer.put(Tokens((token,)))
        answer.put(Tokens(tuple(range(STEP_TOKENS_MAX))), STEP_TOKENS_MAX)
        frames = await other.receive()
        assert [len(frame.tokens) for frame in frames if isinstance(frame, Step)] == [
            STEP_TOKENS_MAX,
            1,
            STEP_TOKENS_MAX,
        ]
        assert len(frames) == 3


async def test_what_no_step_can_carry_leaves_by_itself(autojump_clock: MockClock) -> None:
    scored, none, many = (
        Tokens((1,), (Logprob(-1.0),)),
        Tokens(()),
        Tokens(tuple(range(STEP_TOKENS_MAX + 1))),
    )
    async with asked(1) as (other, (answer,)):
        for reply in (scored, none, many):
            answer.put(reply, len(reply.ids))
        assert await other.receive() == [item(1, reply) for reply in (scored, none, many)]


async def test_an_end_that_takes_no_steps_is_sent_a_frame_for_each_token(autojump_clock: MockClock) -> None:
    async with asked(1, takes_steps=False) as (other, (answer,)):
        answer.put(Tokens((1,)))
        answer.put(Tokens((2,)))
        assert await other.receive() == [item(1, Tokens((1,))), item(1, Tokens((2,)))]


async def test_tokens_behind_an_attachment_wait_for_it_and_those_of_other_streams_do_not(
    autojump_clock: MockClock,
) -> None:
    tensor = Tensor(Dtype.UINT8, (4,), memoryview(b"data"))
    async with asked(2) as (other, (first, second)):
        first.put(Embedded((tensor,)))
        first.put(Tokens((1,)))
        second.put(Tokens((2,)))
        kinds = [(type(frame).__name__, getattr(frame, "stream", None)) for frame in await other.receive()]
        assert kinds == [("Item", 1), ("Step", None), ("ReplyData", 1), ("Item", 1)]
