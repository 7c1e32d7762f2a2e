"""Early ends of responses, lanes and sockets: a cancel, a client that leaves or is slow, a drain, the age limit."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from tests.rig.gateway import at_rest, create, gateway_client, leave, leave_all, post
from tests.rig.sockets import collected, gateway_websocket, last_event

# Cancelling ----------------------------------------------------------------------------------------


async def test_a_cancel_ends_the_response_that_it_names_and_no_other(rather_slow: MockClock) -> None:
    async with gateway_websocket() as (rig, client):
        for lane in ("a", "b", None):
            await client.say(create("n=50 s=1", stream_id=lane))
        await trio.sleep(2.5)
        await client.say({"type": "response.cancel", "stream_id": "b"})
        lanes = await collected(client, 1)
        assert lanes["b"][-1]["response"]["incomplete_details"] == {"reason": "cancelled"}
        await trio.sleep(0.1)
        assert (rig.worker.running, rig.worker.left) == (2, 1)
        assert (await last_event(client, {"type": "response.cancel"})).get("stream_id") is None
        mine = lanes["a"][0]["response"]["id"]
        for nothing in ({"stream_id": "b", "response_id": mine}, {"response_id": "resp_x"}, {"stream_id": "z"}, {}):
            await client.say({"type": "response.cancel", **nothing})
        await trio.sleep(2)
        assert rig.worker.running == 1
        assert (await last_event(client, {"type": "response.cancel", "response_id": mine}))["response"]["id"] == mine
        await trio.testing.wait_all_tasks_blocked()
        assert rig.worker.running == 0


async def test_a_cancel_ends_a_waiting_request_and_starts_the_next_of_its_lane(rather_slow: MockClock) -> None:
    async with gateway_websocket() as (_, client):
        await client.say(create("n=5 s=1", stream_id="a"))
        parent = (await client.events("response.in_progress"))[-1]["response"]["id"]
        await client.say(create("fork", stream_id="b", previous_response_id=parent))
        await client.say(create("behind n=1 s=0", stream_id="b"))
        await client.say({"type": "response.cancel", "stream_id": "b"})
        cancelled, answered = await client.events(), await client.events("response.completed")
        assert (cancelled[-1]["type"], cancelled[-1]["stream_id"]) == ("response.incomplete", "b")
        assert cancelled[-1]["response"]["usage"]["output_tokens"] == 0
        assert answered[-1]["stream_id"] == "b"
        assert trio.current_time() < 1
        assert (await client.events())[-1]["stream_id"] == "a"


async def test_a_cancelled_response_can_be_continued_by_a_fork_that_waits(rather_slow: MockClock) -> None:
    async with gateway_websocket() as (rig, client):
        await client.say(create("n=50 s=1", stream_id="a"))
        parent = (await client.events("response.output_text.delta"))[0]["response"]["id"]
        await client.say(create("fork n=1 s=0", stream_id="b", previous_response_id=parent))
        await client.say({"type": "response.cancel", "response_id": parent})
        lanes = await collected(client, 2)
        assert lanes["a"][-1]["type"] == "response.incomplete"
        assert lanes["b"][-1]["type"] == "response.completed"
        assert rig.worker.prompts[-1] == "user\nn=50 s=1\nassistant\nThe\nuser\nfork n=1 s=0\nassistant\n"


# Ends ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close frame", "close"])
async def test_a_client_that_leaves_ends_every_lane_and_waiting_requests_never_start(
    how: str, rather_slow: MockClock
) -> None:
    async with gateway_websocket(websocket_running_max=3) as (rig, client):
        for number in range(6):
            await client.say(create("n=100 s=1", stream_id=f"l{number}"))
        await trio.sleep(2.5)
        await leave(client, how)
        await at_rest(rig)
        assert trio.current_time() < 3
        assert (rig.worker.left, len(rig.worker.prompts)) == (3, 3)


async def test_responses_that_began_before_the_age_limit_are_completed_and_later_ones_refused(
    rather_slow: MockClock,
) -> None:
    async with gateway_websocket(websocket_s_max=100) as (rig, client):
        await trio.sleep(99)
        for lane in "aba":  # the last one waits for its lane
            await client.say(create("n=3 s=1", stream_id=lane))
        await trio.sleep(2)
        await client.say(create(stream_id="late"))
        lanes = await collected(client, 5)
        assert lanes["a"].pop()["error"]["code"] == "websocket_connection_limit_reached"
        assert lanes["late"][0]["error"]["code"] == "websocket_connection_limit_reached"
        assert [lanes[lane][-1]["type"] for lane in "ab"] == ["response.completed"] * 2
        assert lanes[None][-1]["error"]["code"] == "websocket_connection_limit_reached"
        assert await client.close_code() == 1000
        await leave_all(rig)


async def test_a_bug_fails_its_response_alone(
    rather_slow: MockClock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway_websocket() as (rig, client):
        await client.say(create("n=5 s=1", stream_id="a"))
        await client.events("response.in_progress")

        def broken(name: str) -> None:
            raise ZeroDivisionError

        with monkeypatch.context() as patch:
            patch.setattr(type(rig.gateway.runner), "find", lambda _, name: broken(name))
            await client.say(create("n=5 s=1", stream_id="b"))
            assert (await client.events("error"))[-1]["error"]["code"] == "internal"
        assert (await client.events())[-1]["type"] == "response.completed"
    assert "a bug failed a request" in caplog.text


async def test_last_events_of_long_responses_wait_for_their_reader(rather_slow: MockClock) -> None:
    """They repeat the whole text several times, so two responses that end together could fill a backlog."""
    async with gateway_websocket(2048, backlog_bytes_max=6_000, send_buffer_bytes=4096) as (rig, client):
        for lane in "abc":
            await client.say(create("n=1000 s=0.01", stream_id=lane))
        texts = [(await client.events())[-1]["response"]["output"][0]["content"][0]["text"] for _ in "abc"]
        assert list(map(len, texts)) == [1120] * 3
        await leave_all(rig)


async def test_last_events_of_a_long_streamed_response_wait_for_their_reader(rather_slow: MockClock) -> None:
    async with gateway_client(2048, backlog_bytes_max=8_500, send_buffer_bytes=2048) as (rig, client):
        await client.send(post({"model": "tiny", "input": "n=60 s=0.001", "stream": True}, "/v1/responses"))
        await trio.sleep(5)  # all deltas have come, and most of them wait
        reply = await client.reply()
        assert (reply.whole, b"response.completed" in reply.body) == (True, True)
        await leave_all(rig)
