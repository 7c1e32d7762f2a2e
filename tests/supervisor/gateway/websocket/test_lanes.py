"""Many lanes on one WebSocket: order, limits, forks and history."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.rig.gateway import create, gateway_rig, leave_all
from tests.rig.sockets import collected, error_code, gateway_websocket, output_text, types, websocket_client, whole

# Order -------------------------------------------------------------------------------------------


async def test_lanes_run_at_the_same_time_and_each_of_them_in_order(rather_slow: MockClock) -> None:
    async with gateway_websocket() as (rig, client):
        for lane in ("a", "b", None):
            for number in (1, 2):
                await client.say(create(f"{lane}{number} n=4 s=1", stream_id=lane))
        lanes = await collected(client, 6)
        assert 8 <= trio.current_time() < 8.5
        for events in lanes.values():
            assert types(events).count("response.completed") == 2
            first = types(events).index("response.completed")
            assert [event["sequence_number"] for event in events[: first + 1]] == list(range(first + 1))
            assert output_text(events[: first + 1]) == output_text(events[first + 1 :]) == "The oak is o"
        assert set(lanes) == {"a", "b", None}
        assert [prompt.split()[1] for prompt in rig.worker.prompts[3:]].count("None2") == 1
        await leave_all(rig)


async def test_responses_beyond_the_limit_start_in_the_order_of_their_requests(rather_slow: MockClock) -> None:
    async with gateway_websocket(websocket_running_max=2) as (rig, client):
        for lane in "abcd":
            await client.say(create("n=2 s=1", stream_id=lane))
        await trio.sleep(1.5)
        assert rig.worker.running == 2
        lanes = await collected(client, 4)
        assert 4 <= trio.current_time() < 4.2
        ends = {lane: events[0]["response"]["id"] for lane, events in lanes.items()}
        assert sorted(ends, key=ends.__getitem__) == ["a", "b", "c", "d"]


async def test_a_lane_without_a_response_makes_room_for_another(rather_slow: MockClock) -> None:
    async with gateway_websocket(websocket_lanes_max=1) as (_, client):
        assert await error_code(client, create(model="other", stream_id="a")) == "model_not_found"
        assert (await whole(client, create("n=1", stream_id="b")))["status"] == "completed"


@pytest.mark.parametrize("name", ["", "x" * 257, "a b", "ä", 7, ["a"]])
async def test_an_invalid_lane_name_is_refused(name: str | int | list[str], rather_slow: MockClock) -> None:
    async with gateway_websocket() as (_, client):
        await client.say(create(stream_id=name))
        refused = await client.event()
        assert (refused["type"], refused["status"], refused["error"]["code"]) == ("error", 400, "invalid_stream_id")
        assert "stream_id" not in refused
        assert (await whole(client, create("n=2", stream_id="x" * 256)))["status"] == "completed"


# History and forks ---------------------------------------------------------------------------------


async def test_a_lane_can_continue_the_latest_response_of_any_other(rather_slow: MockClock) -> None:
    async with gateway_websocket() as (rig, client):
        first = await whole(client, create("first n=2", stream_id="a"))
        for lane in ("b", None):
            forked = await whole(client, create("fork n=2", stream_id=lane, previous_response_id=first["id"]))
            assert forked["previous_response_id"] == first["id"]
            assert rig.worker.prompts[-1] == "user\nfirst n=2\nassistant\nThe oak\nuser\nfork n=2\nassistant\n"
        second = await whole(client, create("second n=2", stream_id="a", previous_response_id=first["id"]))
        await client.say(create("late", stream_id="b", previous_response_id=first["id"]))
        assert (await client.event())["error"]["code"] == "previous_response_not_found"  # it is no lane's latest
        await whole(client, create("third n=1", stream_id="c", previous_response_id=second["id"]))
        assert rig.worker.prompts[-1].count("The oak") == 2


@pytest.mark.parametrize("content", ["I say: ", [{"type": "output_text", "text": "I say: "}]])
async def test_an_answer_that_goes_on_with_a_message_is_remembered_as_one(
    content: object, rather_slow: MockClock
) -> None:
    async with gateway_websocket() as (rig, client):
        begun = [{"role": "user", "content": "first n=2"}, {"role": "assistant", "content": content}]
        first = await whole(client, create(input=begun, continue_final_message=True))
        assert rig.worker.prompts[-1] == "user\nfirst n=2\nassistant\nI say: "
        await whole(client, create("second n=1", previous_response_id=first["id"]))
        assert rig.worker.prompts[-1] == "user\nfirst n=2\nassistant\nI say: The oak\nuser\nsecond n=1\nassistant\n"


async def test_a_fork_waits_for_its_parent_to_end(rather_slow: MockClock) -> None:
    async with gateway_websocket() as (rig, client):
        await client.say(create("n=5 s=1", stream_id="a"))
        parent = (await client.events("response.in_progress"))[-1]["response"]["id"]
        await client.say(create("fork n=1 s=0", stream_id="b", previous_response_id=parent))
        await client.say(create("behind n=1 s=0", stream_id="b"))
        await client.say(create("beside n=1", stream_id="c"))
        assert (await client.events("response.completed"))[-1]["stream_id"] == "c"
        lanes = await collected(client, 3)
        assert 5 <= trio.current_time() < 5.2
        assert types(lanes["b"]).count("response.completed") == 2
        assert rig.worker.prompts[-2:] == [
            "user\nn=5 s=1\nassistant\nThe oak is old\nuser\nfork n=1 s=0\nassistant\n",
            "user\nbehind n=1 s=0\nassistant\n",
        ]


async def test_a_fork_of_a_failed_response_is_refused(rather_slow: MockClock) -> None:
    async with gateway_websocket() as (_, client):
        await client.say(create("n=5 s=1 fail=2", stream_id="a"))
        parent = (await client.events("response.in_progress"))[-1]["response"]["id"]
        await client.say(create("fork", stream_id="b", previous_response_id=parent))
        lanes = await collected(client, 2)
        assert lanes["a"][-1]["type"] == "response.failed"
        assert lanes["b"][-1]["error"]["code"] == "previous_response_not_found"
        assert lanes["b"][-1]["error"]["param"] == "previous_response_id"


async def test_a_fork_continues_the_response_that_was_the_latest_when_it_came(rather_slow: MockClock) -> None:
    async with gateway_websocket(websocket_running_max=1) as (rig, client):
        first = await whole(client, create("first n=1", stream_id="a"))
        await client.say(create("second n=3 s=1", stream_id="a", previous_response_id=first["id"]))
        await client.say(create("fork n=1 s=0", stream_id="b", previous_response_id=first["id"]))
        await collected(client, 2)
        assert rig.worker.prompts[-1] == "user\nfirst n=1\nassistant\nThe\nuser\nfork n=1 s=0\nassistant\n"


async def test_a_failed_fork_keeps_its_parent_and_a_failed_lane_forgets_it(rather_slow: MockClock) -> None:
    async with gateway_websocket() as (_, client):
        parent = await whole(client, create("n=1", stream_id="a"))
        for fields in ({"model": "other"}, {"max_output_tokens": 5000}):
            await client.say(create("fork", stream_id="b", previous_response_id=parent["id"], **fields))
            assert (await client.event())["type"] == "error"
        await client.say(create("n=5 fail=2", stream_id="b", previous_response_id=parent["id"]))
        assert (await client.events())[-1]["type"] == "response.failed"
        assert (await whole(client, create("n=1", stream_id="c", previous_response_id=parent["id"])))["output"]
        await client.say(create(model="other", stream_id="a", previous_response_id=parent["id"]))
        assert (await client.event())["error"]["code"] == "model_not_found"
        await client.say(create(stream_id="a", previous_response_id=parent["id"]))
        assert (await client.event())["error"]["code"] == "previous_response_not_found"


@pytest.mark.parametrize("lane", ["a", None])
async def test_a_message_that_is_no_event_counts_as_a_failure_of_its_lane(
    lane: str | None, rather_slow: MockClock
) -> None:
    async with gateway_websocket() as (_, client):
        parent = await whole(client, create("n=1", stream_id=lane))
        cases: list[tuple[dict[str, Any], str]] = [
            ({"stream_id": "b", "temperature": 9}, "invalid_request"),
            ({"stream_id": "not a lane"}, "invalid_stream_id"),
        ]
        for fields, code in cases:
            assert await error_code(client, create(previous_response_id=parent["id"], **fields)) == code
        assert (await whole(client, create("n=1", stream_id="c", previous_response_id=parent["id"])))["output"]
        for code in ("invalid_request", "previous_response_not_found"):
            fields = {"temperature": 9} if code == "invalid_request" else {}
            assert await error_code(client, create(stream_id=lane, previous_response_id=parent["id"], **fields)) == code


async def test_a_response_of_another_connection_cannot_be_continued(rather_slow: MockClock) -> None:
    async with gateway_rig() as rig:
        one, other = await websocket_client(rig), await websocket_client(rig)
        response = await whole(one, create("n=1"))
        assert await error_code(other, create(previous_response_id=response["id"])) == "previous_response_not_found"


async def test_a_warm_up_has_no_output_and_can_be_continued(rather_slow: MockClock) -> None:
    async with gateway_websocket() as (rig, client):
        await client.say(create("warm n=3", generate=False, stream_id="a"))
        events = await client.events()
        assert types(events) == ["response.created", "response.in_progress", "response.completed"]
        last = events[-1]["response"]
        assert (last["output"], last["usage"]["output_tokens"]) == ([], 0)
        await whole(client, create("then n=2", stream_id="a", previous_response_id=last["id"]))
        assert rig.worker.prompts[-1] == "user\nwarm n=3\nuser\nthen n=2\nassistant\n"


@pytest.mark.parametrize(("answers_bytes_max", "waits"), [(10_000_000, True), (2000, False)])
async def test_last_events_that_wait_for_their_reader_reserve_memory(
    answers_bytes_max: int, waits: bool, rather_slow: MockClock
) -> None:
    """They repeat the text several times, and are in no backlog unless there is no memory for them."""
    limits = {"answers_bytes_max": answers_bytes_max, "backlog_bytes_max": 60_000, "send_buffer_bytes": 4096}
    async with gateway_websocket(4096, stall_s=600.0, **limits) as (rig, client):
        await client.say(create("n=240"))
        await trio.sleep(60)
        for _ in range(300 if waits else 0):  # on a busy machine the clock jumps before the answer is whole
            if rig.gateway.memory.answers.reserved_bytes <= 2000:
                await trio.sleep(1)
        assert (rig.gateway.memory.answers.reserved_bytes > 2000) is waits
        assert (await client.events())[-1]["type"] == "response.completed"
        assert rig.gateway.memory.answers.reserved_bytes == 0
