"""Pings of a quiet WebSocket: when they come, when a client counts as gone, and who must never."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from supervisor.gateway.websocket.pings import ANSWERED_SILENT_S, IDLE_SILENT_S, PING_AFTER_S, READ_BYTES_S, Pings
from tests.rig.gateway import Client, create, leave_all
from tests.rig.sockets import gateway_websocket, last_event

SLOW = create("n=1 s=500")


def at(when_s: float) -> Any:
    """A time, within what it takes to be served."""
    return pytest.approx(when_s, abs=0.1)


async def pings(client: Client, count: int) -> list[float]:
    """Read so many frames, which must be pings, and return when each came."""
    times = []
    for _ in range(count):
        kind, payload = await client.frame()
        assert (kind, len(payload)) == (0x89, 8)
        times.append(trio.current_time())
    return times


async def test_a_quiet_client_is_pinged_every_20_s_from_its_last_byte_on(rather_slow: MockClock) -> None:
    async with gateway_websocket() as (_, client):
        client.answers_pings = False
        assert await pings(client, 2) == [at(20), at(40)]
        await trio.sleep(10)
        await client.say(b"", 0x89)
        assert await client.frame() == (0x8A, b"")
        assert await pings(client, 1) == [at(70)]


async def test_a_client_that_sends_often_enough_is_never_pinged(rather_slow: MockClock) -> None:
    async with gateway_websocket(first_token_s=600) as (_, client):
        client.answers_pings = False
        await client.say(SLOW)
        for _ in range(26):
            await trio.sleep(19)
            await client.say(b"own", 0x89)
        kinds = [(await client.frame())[0] for _ in range(2 + 26)]
        assert (kinds.count(0x81), kinds.count(0x8A)) == (2, 26)


@pytest.mark.parametrize("asked", [[SLOW], [create("n=3 s=0"), SLOW]])
async def test_what_runs_for_a_client_that_does_not_answer_pings_ends_after_60_s(
    asked: list[dict[str, object]], rather_slow: MockClock
) -> None:
    async with gateway_websocket(first_token_s=600) as (rig, client):
        client.answers_pings = False
        for request in asked[:-1]:
            await last_event(client, request)
        await client.say(asked[-1])
        began = trio.current_time()
        assert await client.close_frame() == (1013, "the client answers no ping")
        assert 0 <= trio.current_time() - began - ANSWERED_SILENT_S < 8
        assert rig.worker.left == 1
        await leave_all(rig)
        assert 'espalier_clients_dropped_total{reason="silent"} 1' in rig.metrics.render({}).decode()


async def test_a_client_that_answers_pings_may_wait_for_any_time(rather_slow: MockClock) -> None:
    async with gateway_websocket(first_token_s=600) as (_, client):
        assert (await last_event(client, SLOW))["type"] == "response.completed"
        assert trio.current_time() == at(500)


@pytest.mark.realtime  # a clock that jumps while the kernel still carries bytes is tried again, alone
async def test_a_client_that_reads_slowly_keeps_its_response(rather_slow: MockClock) -> None:
    """Its pongs come when it has read what was sent before the pings: the last ones minutes later."""
    async with gateway_websocket(total_s=900, stall_s=300) as (rig, client):
        logprobs = {"include": ["message.output_text.logprobs"], "top_logprobs": 20}
        await client.say(create("n=700 s=0.28", max_output_tokens=700, **logprobs))
        while True:
            kind, payload = await client.frame()
            assert kind == 0x81
            await trio.sleep(len(payload) / (1.05 * READ_BYTES_S))
            if b'"response.incomplete"' in payload[:60]:
                break
        assert trio.current_time() > 500
        await leave_all(rig)


async def test_a_client_without_a_response_may_be_silent_for_300_s(rather_slow: MockClock) -> None:
    """It may be running a tool; synchronous clients answer no ping meanwhile."""
    async with gateway_websocket() as (_, client):
        client.answers_pings = False
        for _ in range(2):
            await trio.sleep(IDLE_SILENT_S - 1)
            client.answers_pings = True
            assert (await last_event(client, create("n=1")))["type"] == "response.completed"
            client.answers_pings = False
        before = trio.current_time()
        assert await client.close_code() == 1013
        assert 0 <= trio.current_time() - before - IDLE_SILENT_S < 8


async def test_pongs_do_not_make_a_connection_any_less_idle(rather_slow: MockClock) -> None:
    async with gateway_websocket(websocket_idle_s=200) as (_, client):
        assert await client.close_frame() == (1000, "nothing was received for 200 s")
        assert trio.current_time() == at(200)


async def test_keepalive_s_0_turns_pings_off(rather_slow: MockClock) -> None:
    async with gateway_websocket(first_token_s=600) as (rig, client):
        rig.gateway.keepalive_s = 0
        client.answers_pings = False
        assert (await last_event(client, SLOW))["type"] == "response.completed"


def test_only_a_client_that_was_asked_can_be_gone() -> None:
    pings = Pings()
    assert pings.due_at(5) == 5 + PING_AFTER_S
    assert pings.gone_at(5, answered=True) == inf
    pings.ping(25, 5, 1000)
    assert pings.gone_at(5, answered=True) == 5 + ANSWERED_SILENT_S + 1000 / READ_BYTES_S
    assert pings.gone_at(5, answered=False) == 5 + IDLE_SILENT_S + 1000 / READ_BYTES_S
    # Any byte is an answer.
    assert (pings.due_at(30), pings.gone_at(30, answered=True)) == (50, inf)


def test_a_pong_shows_what_the_client_has_read_and_no_other_payload_does() -> None:
    pings = Pings()
    first = pings.ping(25, 5, 1000)[2:]
    pings.ping(45, 5, 5000)
    for wrong in (b"", b"12345678", (5001).to_bytes(8, "big"), b"x" * 125):
        pings.ponged(wrong)
    assert pings.read_bytes == 0
    pings.ponged(first)
    pings.ponged((0).to_bytes(8, "big"))
    assert pings.read_bytes == 1000
    pings.ping(80, 60, 9000)
    assert pings.gone_at(60, answered=True) == 60 + ANSWERED_SILENT_S + 8000 / READ_BYTES_S
