"""Many lanes on one WebSocket: order, limits, forks and memory."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from protocol.text_messages import Role, Turn
from supervisor.gateway.websocket.history import TURN_BYTES, Conversation, ResponseHistory
from tests.rig.gateway import Client, at_rest, create, rig
from tests.rig.sockets import collected, said, types, websocket_client, whole

# Order -------------------------------------------------------------------------------------------


async def test_lanes_run_together_and_each_of_them_in_order(rather_slow: trio.testing.MockClock) -> None:
    async with rig() as made:
        client = await websocket_client(made)
        for lane in ("a", "b", None):
            for number in (1, 2):
                await client.say(create(f"{lane}{number} n=4 s=1", stream_id=lane))
        lanes = await collected(client, 6)
        assert 8 <= trio.current_time() < 8.5
        for events in lanes.values():
            assert types(events).count("response.completed") == 2
            first = types(events).index("response.completed")
            assert [event["sequence_number"] for event in events[: first + 1]] == list(range(first + 1))
            assert said(events[: first + 1]) == said(events[first + 1 :]) == "The oak is o"
        assert set(lanes) == {"a", "b", None}
        assert [prompt.split()[1] for prompt in made.worker.prompts[3:]].count("None2") == 1
        await client.stream.aclose()
        await at_rest(made)


async def test_only_so_many_responses_run_at_once_and_the_first_to_come_goes_first(
    rather_slow: trio.testing.MockClock,
) -> None:
    async with rig(websocket_running_max=2) as made:
        client = await websocket_client(made)
        for lane in "abcd":
            await client.say(create("n=2 s=1", stream_id=lane))
        await trio.sleep(1.5)
        assert made.worker.running == 2
        lanes = await collected(client, 4)
        assert 4 <= trio.current_time() < 4.2
        ends = {lane: events[0]["response"]["id"] for lane, events in lanes.items()}
        assert sorted(ends, key=ends.get) == ["a", "b", "c", "d"]


async def test_only_so_many_responses_wait(rather_slow: trio.testing.MockClock) -> None:
    async with rig(websocket_queue_max=2, websocket_running_max=1) as made:
        client = await websocket_client(made)
        await client.say(create("n=3 s=1"))
        await client.events("response.output_text.delta")
        for number in range(4):
            await client.say(create("n=1", stream_id=f"l{number}"))
        events = [event for _ in range(5) for event in await client.events()]
        refused = [event for event in events if event["type"] == "error"]
        assert [(event["stream_id"], event["error"]["code"]) for event in refused] == [
            ("l2", "overloaded"),
            ("l3", "overloaded"),
        ]
        assert refused[0]["headers"] == {"retry-after": "1"}
        assert types(events).count("response.completed") == 3


async def test_a_lane_that_waits_for_itself_holds_no_other_up(rather_slow: trio.testing.MockClock) -> None:
    async with rig(websocket_running_max=2) as made:
        client = await websocket_client(made)
        for _ in range(3):
            await client.say(create("n=5 s=1", stream_id="long"))
        await client.say(create("n=1", stream_id="short"))
        events = await client.events("response.completed")
        assert events[-1]["stream_id"] == "short"
        assert trio.current_time() < 1


async def test_only_so_many_lanes_have_names(rather_slow: trio.testing.MockClock) -> None:
    async with rig(websocket_lanes_max=2) as made:
        client = await websocket_client(made)
        await client.say(create("n=1", stream_id="a"))
        await client.events()
        await client.say(create("n=3 s=1", stream_id="b"))
        await client.say(create("n=1", stream_id="c"))
        refused = (await client.events("error"))[-1]
        assert (refused["status"], refused["stream_id"], refused["error"]["param"]) == (400, "c", "stream_id")
        assert refused["error"]["code"] == "websocket_stream_limit_reached"
        await client.events()
        for lane in (None, "a", "b"):
            await client.say(create("n=1", stream_id=lane))
            assert (await client.events())[-1]["type"] == "response.completed"


async def test_a_lane_of_which_nothing_is_left_makes_room_for_another(rather_slow: trio.testing.MockClock) -> None:
    async with rig(websocket_lanes_max=1) as made:
        client = await websocket_client(made)
        await client.say(create(model="other", stream_id="a"))
        assert (await client.event())["error"]["code"] == "model_not_found"
        await client.say(create("n=1", stream_id="b"))
        assert (await client.events())[-1]["type"] == "response.completed"


@pytest.mark.parametrize("name", ["", "x" * 257, "a b", "ä", 7, ["a"]])
async def test_a_lane_with_a_name_that_is_none_is_refused(
    name: str | int | list[str], rather_slow: trio.testing.MockClock
) -> None:
    async with rig() as made:
        client = await websocket_client(made)
        await client.say(create(stream_id=name))
        refused = await client.event()
        assert (refused["type"], refused["status"], refused["error"]["code"]) == ("error", 400, "invalid_stream_id")
        assert "stream_id" not in refused
        assert (await whole(client, create("n=2", stream_id="x" * 256)))["status"] == "completed"


# ResponseHistory and forks ----------------------------------------------------------------------------------


async def test_any_lane_continues_the_latest_response_of_any_other(rather_slow: trio.testing.MockClock) -> None:
    async with rig() as made:
        client = await websocket_client(made)
        first = await whole(client, create("first n=2", stream_id="a"))
        for lane in ("b", None):
            forked = await whole(client, create("fork n=2", stream_id=lane, previous_response_id=first["id"]))
            assert forked["previous_response_id"] == first["id"]
            assert made.worker.prompts[-1] == "user\nfirst n=2\nassistant\nThe oak\nuser\nfork n=2\nassistant\n"
        second = await whole(client, create("second n=2", stream_id="a", previous_response_id=first["id"]))
        await client.say(create("late", stream_id="b", previous_response_id=first["id"]))
        assert (await client.event())["error"]["code"] == "previous_response_not_found"  # it is no lane's latest
        await whole(client, create("third n=1", stream_id="c", previous_response_id=second["id"]))
        assert made.worker.prompts[-1].count("The oak") == 2


async def test_a_fork_waits_for_its_parent_to_end(rather_slow: trio.testing.MockClock) -> None:
    async with rig() as made:
        client = await websocket_client(made)
        await client.say(create("n=5 s=1", stream_id="a"))
        parent = (await client.events("response.in_progress"))[-1]["response"]["id"]
        await client.say(create("fork n=1 s=0", stream_id="b", previous_response_id=parent))
        await client.say(create("behind n=1 s=0", stream_id="b"))
        await client.say(create("beside n=1", stream_id="c"))
        assert (await client.events("response.completed"))[-1]["stream_id"] == "c"
        lanes = await collected(client, 3)
        assert 5 <= trio.current_time() < 5.2
        assert types(lanes["b"]).count("response.completed") == 2
        assert made.worker.prompts[-2:] == [
            "user\nn=5 s=1\nassistant\nThe oak is old\nuser\nfork n=1 s=0\nassistant\n",
            "user\nbehind n=1 s=0\nassistant\n",
        ]


async def test_a_fork_of_what_failed_finds_nothing(rather_slow: trio.testing.MockClock) -> None:
    async with rig() as made:
        client = await websocket_client(made)
        await client.say(create("n=5 s=1 fail=2", stream_id="a"))
        parent = (await client.events("response.in_progress"))[-1]["response"]["id"]
        await client.say(create("fork", stream_id="b", previous_response_id=parent))
        lanes = await collected(client, 2)
        assert lanes["a"][-1]["type"] == "response.failed"
        assert lanes["b"][-1]["error"]["code"] == "previous_response_not_found"
        assert lanes["b"][-1]["error"]["param"] == "previous_response_id"


async def test_a_fork_keeps_what_was_there_when_it_came(rather_slow: trio.testing.MockClock) -> None:
    async with rig(websocket_running_max=1) as made:
        client = await websocket_client(made)
        first = await whole(client, create("first n=1", stream_id="a"))
        await client.say(create("second n=3 s=1", stream_id="a", previous_response_id=first["id"]))
        await client.say(create("fork n=1 s=0", stream_id="b", previous_response_id=first["id"]))
        await collected(client, 2)
        assert made.worker.prompts[-1] == "user\nfirst n=1\nassistant\nThe\nuser\nfork n=1 s=0\nassistant\n"


async def test_a_fork_keeps_its_parent_however_long_it_waits_for_room(rather_slow: trio.testing.MockClock) -> None:
    async with rig(websocket_running_max=1) as made:
        client = await websocket_client(made)
        await client.say(create("first n=3 s=1", stream_id="a"))
        parent = (await client.events("response.in_progress"))[-1]["response"]["id"]
        await client.say(create("second n=1 s=0", stream_id="a", previous_response_id=parent))
        await client.say(create("fork n=1 s=0", stream_id="b", previous_response_id=parent))
        lanes = await collected(client, 3)
        assert lanes["b"][-1]["type"] == "response.completed"
        assert made.worker.prompts[-1].count("user") == 2


async def test_a_fork_that_fails_keeps_its_parent_and_a_lane_that_fails_forgets_it(
    rather_slow: trio.testing.MockClock,
) -> None:
    async with rig() as made:
        client = await websocket_client(made)
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
async def test_what_cannot_be_read_counts_as_a_failure_of_its_lane(
    lane: str | None, rather_slow: trio.testing.MockClock
) -> None:
    async with rig() as made:
        client = await websocket_client(made)
        parent = await whole(client, create("n=1", stream_id=lane))
        for fields, code in [
            ({"stream_id": "b", "temperature": 9}, "invalid_request"),
            ({"stream_id": "not a lane"}, "invalid_stream_id"),
        ]:
            await client.say(create(previous_response_id=parent["id"], **fields))
            assert (await client.event())["error"]["code"] == code
        assert (await whole(client, create("n=1", stream_id="c", previous_response_id=parent["id"])))["output"]
        for code in ("invalid_request", "previous_response_not_found"):
            fields = {"temperature": 9} if code == "invalid_request" else {}
            await client.say(create(stream_id=lane, previous_response_id=parent["id"], **fields))
            assert (await client.event())["error"]["code"] == code


async def test_no_connection_remembers_what_another_said(rather_slow: trio.testing.MockClock) -> None:
    async with rig() as made:
        one, other = await websocket_client(made), await websocket_client(made)
        response = await whole(one, create("n=1"))
        await other.say(create(previous_response_id=response["id"]))
        assert (await other.event())["error"]["code"] == "previous_response_not_found"


async def test_a_full_memory_forgets_what_was_said_longest_ago(rather_slow: trio.testing.MockClock) -> None:
    async with rig(history_bytes_max=2_300) as made:
        client = await websocket_client(made)
        ids = {}
        for lane in "abc":
            ids[lane] = (await whole(client, create("x" * 600 + " n=1", stream_id=lane)))["id"]
        for lane, kind in [("a", "error"), ("c", "response.completed")]:
            await client.say(create("n=1", stream_id=lane, previous_response_id=ids[lane]))
            assert (await client.events())[-1]["type"] == kind
        big = await whole(client, create("x" * 1_900 + " n=1", stream_id="c"))
        await client.say(create(stream_id="c", previous_response_id=big["id"]))
        assert (await client.event())["error"]["code"] == "previous_response_not_found"


def test_memory_counts_what_it_holds() -> None:
    memory = ResponseHistory(10_000)
    turn = Turn(Role.USER, "x" * 1000)
    size = TURN_BYTES + turn.content.__sizeof__()
    first = Conversation.after(None, "r1", turn)
    second = Conversation.after(first, "r2", turn, turn)
    assert (first.size_bytes, second.size_bytes, second.turns) == (size, 3 * size, (turn,) * 3)
    memory.remember("a", first)
    memory.remember("a", second)
    memory.remember(None, first)
    assert (memory.size_bytes, memory.lanes) == (4 * size, {"a", None})
    memory.evict("a", "r1")
    memory.evict("b", "r2")
    memory.evict("a", None)
    assert memory.find("r2") is second
    assert memory.find_in(None, "r2") is None
    memory.evict("a", "r2")
    assert (memory.size_bytes, memory.find("r2")) == (size, None)
    for number in range(100):
        memory.remember(str(number), second)
        assert memory.size_bytes <= 10_000
    assert memory.find("r1") is None
    memory.remember("99", Conversation("big", (), 10_001))
    assert memory.find("big") is None
    assert memory.lanes == {"98"}


async def test_a_warm_up_says_nothing_and_can_be_continued(rather_slow: trio.testing.MockClock) -> None:
    async with rig() as made:
        client = await websocket_client(made)
        await client.say(create("warm n=3", generate=False, stream_id="a"))
        events = await client.events()
        assert types(events) == ["response.created", "response.in_progress", "response.completed"]
        last = events[-1]["response"]
        assert (last["output"], last["usage"]["output_tokens"]) == ([], 0)
        await whole(client, create("then n=2", stream_id="a", previous_response_id=last["id"]))
        assert made.worker.prompts[-1] == "user\nwarm n=3\nuser\nthen n=2\nassistant\n"


@pytest.mark.parametrize(("answers_bytes_max", "waits"), [(10_000_000, True), (2000, False)])
async def test_c2_the_end_of_an_answer_that_waits_for_its_reader_is_counted(
    answers_bytes_max: int, waits: bool, rather_slow: trio.testing.MockClock
) -> None:
    """It repeats the text several times, and is in no backlog: one that finds no memory goes there at once."""
    limits = {"answers_bytes_max": answers_bytes_max, "backlog_bytes_max": 60_000, "send_buffer_bytes": 4096}
    async with rig(stall_s=600.0, **limits) as made:
        client = Client(await made.connect(receive_buffer=4096))
        await client.upgrade()
        await client.say(create("n=240"))
        await trio.sleep(60)
        assert (made.gateway.answers.reserved_bytes > 2000) is waits
        assert (await client.events())[-1]["type"] == "response.completed"
        assert made.gateway.answers.reserved_bytes == 0
