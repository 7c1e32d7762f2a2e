"""What a linked node sends may be wrong: it then loses its own link, and nobody else is disturbed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from protocol.link import frames
from protocol.link.codec import encode as body
from protocol.link.frames import VERSION, Announce, Credit, Hello, Open, encode
from protocol.messages.cluster import Leg, NodeState, Offer
from protocol.messages.engine import EngineInfo
from supervisor.links import websocket
from tests.rig.fake_engine import generate
from tests.rig.nodes import (
    UPGRADE,
    Node,
    Reasons,
    dial,
    link_by_hand,
    linked_nodes,
    linked_pair,
    raw_connection,
    read_to_end,
    undisturbed,
    until,
)

INFO = EngineInfo("x", "1", 100, 64, 640, 64, 8, 1, True)
OFFER = Offer("x-0", "oak", Leg.BOTH, 8, True, INFO)
REQUEST = body(generate())


def announced(offer: Offer) -> bytes:
    return encode(Announce(body(NodeState((offer,)))))


VIOLATIONS = {
    "bytes": b"\xff" * 20,
    "giant length": b"\x02\xff\xff\xff\xff",
    "wrong hello": encode(Hello(VERSION + 1, "x", 1)),
    "credit for no stream": encode(Credit(7, 1)),
    "credit abuse": encode(Open(1, REQUEST, 2**31 - 1, "a-0")) + encode(Credit(1, 2**31 - 1)),
    "no worker named": encode(Open(1, REQUEST, 1)),
    "too much attached": encode(Open(1, REQUEST, 1, "a-0", None, 2**40)),
    "announcement of an impossible load": announced(evolve(OFFER, running=-1)),
    "announcement of an impossible engine": announced(evolve(OFFER, engine=evolve(INFO, request_tokens_max=0))),
}


@pytest.mark.parametrize("violation", VIOLATIONS.values(), ids=VIOLATIONS)
async def test_a_node_that_breaks_the_rules_loses_its_link_and_disturbs_nobody(
    violation: bytes, link_records: Callable[[], list[Any]], rather_slow: MockClock
) -> None:
    async with undisturbed() as a:
        for _ in range(3):
            await link_by_hand(a, "x", violation)
    assert "x-0" not in {offer.name for offer in a.directory.offers()}
    messages = [record.message for record in link_records() if record.peer == "x"]
    assert messages.count("no link") == 1
    assert messages.count("linked") == len(messages) - 1 <= 2


async def test_frames_before_the_greeting_are_refused(reasons: Reasons, rather_slow: MockClock) -> None:
    a = Node("a")

    async def send(transport: websocket.WebSocketTransport) -> None:
        await transport.send_all(encode(Hello(VERSION, "x", 1)) + encode(Open(1, REQUEST, 1, "a-0")))
        while await transport.receive_some():
            pass

    async with linked_nodes(a):
        await dial(a, send)
        await until(reasons)
        assert a.asked == []
    assert len(reasons()) == 1


# Any frames ---------------------------------------------------------------------------------

STREAMS, BYTES, WORDS = st.integers(-1, 4), st.binary(max_size=20), st.text(max_size=5)
FRAMES = st.one_of(
    st.builds(
        Open,
        STREAMS,
        BYTES | st.just(REQUEST),
        st.integers(-1, 9),
        st.sampled_from(["", "a-0", "nobody"]),
        st.none() | st.integers(-9, 10**9),
        st.integers(-1, 10),
    ),
    st.builds(Credit, STREAMS, st.integers(-1, 2**32)),
    st.builds(frames.Cancel, STREAMS, WORDS),
    st.builds(frames.Item, STREAMS, BYTES, st.integers(-1, 9), st.integers(-1, 9)),
    st.builds(frames.End, STREAMS, BYTES),
    st.builds(frames.Fail, STREAMS, WORDS, WORDS),
    st.builds(frames.RequestData, STREAMS, BYTES),
    st.builds(frames.ReplyData, STREAMS, BYTES),
    st.builds(frames.WindowUpdate, st.integers(-1, 2**40)),
    st.just(frames.KeepAlive()),
    st.builds(Announce, BYTES | st.just(body(NodeState((OFFER,))))),
    st.builds(frames.Bye, WORDS, WORDS),
)
MESSAGES = st.lists(FRAMES.map(encode) | st.binary(max_size=40), max_size=6).map(b"".join)


@pytest.mark.parametrize("greeted", [True, False])
def test_no_bytes_and_no_frames_disturb_a_node(greeted: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def send(message: bytes) -> None:
        async with linked_pair(a_step_s=0.001) as (a, b):
            if greeted:
                await link_by_hand(a, "x", message, close_after_s=0)
            else:
                async with raw_connection(a, UPGRADE + message) as stream:
                    await stream.send_eof()
                    await read_to_end(stream)
            assert await b.ask(a, tokens_max=5) == [0, 1, 2, 3, 4]
            await until(lambda: a.linked == {"b"} and a.directory.running == 0)
            assert not a.links.statistics().unauthenticated

    @settings(max_examples=25)
    @given(message=MESSAGES)
    def send_any(message: bytes) -> None:
        trio.run(send, message)

    send_any()
    assert not [record for record in caplog.records if record.exc_info]
