"""The writer of a link: few and whole messages, of limited size, to an end that reads them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from trio.testing import MockClock, wait_all_tasks_blocked

from protocol import codec
from protocol.errors import LinkLost, PeerViolation
from protocol.frames import Open
from protocol.messages import FlushCache
from protocol.peer import MESSAGE_BYTES_MAX
from supervisor.links.transport import Transport
from tests.rig.fake_engine import generate
from tests.rig.links import hand_written
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
