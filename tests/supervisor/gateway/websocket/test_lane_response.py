"""A turn with tools over a WebSocket: the calls of an answer, and their results by `previous_response_id`."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.messages.text import Role
from tests.protocol.dialects.responses.test_tools import CODEX_BODY
from tests.rig.calling import CALLING, FUNCTION, NAMESPACE, whole_line
from tests.rig.gateway import TINY, Client, Worker, create, gateway_rig, leave_all
from tests.rig.marked_format import Marked
from tests.rig.sockets import last_event, types, websocket_client, whole

LINE = '[think]Old?[/think]Oak. [call f]{"a": 1}[/call][call n__g]{}[/call]'
TOOLS: dict[str, Any] = {"tools": [FUNCTION, NAMESPACE]}


@pytest.fixture(autouse=True)
def _format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.text.choices.make_stage", lambda *_: Marked())


def result(call: dict[str, Any], output: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call["call_id"], "output": output}


async def called(client: Client, **fields: Any) -> tuple[str, list[dict[str, Any]]]:
    """Return the id of a response that calls functions, and its calls."""
    response = await whole(client, create(whole_line(LINE), **TOOLS, **fields))
    return response["id"], [item for item in response["output"] if item["type"] == "function_call"]


async def test_results_alone_continue_a_response_with_calls() -> None:
    async with gateway_rig(worker=Worker(line=LINE), model=CALLING) as rig:
        client = await websocket_client(rig)
        first, calls = await called(client)
        assert [(call["name"], call.get("namespace")) for call in calls] == [("f", None), ("g", "n")]
        parts = [{"type": "input_text", "text": "done "}, {"type": "input_text", "text": "g"}]
        results = [result(calls[0], "done f"), result(calls[1], parts)]
        second = await whole(client, create(results, previous_response_id=first, **TOOLS))
        assert second["status"] == "completed"
        prompt = TINY.tokenizer.decode(rig.worker.asked[-1].tokens, skip_special_tokens=False)
        assert '{"name": "f", "arguments": {"a": 1}}' in prompt
        assert '{"name": "n__g", "arguments": {}}' in prompt
        assert prompt.index("done f") < prompt.index("g<|im_end|>"), prompt
        await leave_all(rig)


async def test_the_calls_and_the_results_of_a_conversation_count_as_its_memory() -> None:
    async with gateway_rig(worker=Worker(line=LINE), model=CALLING) as rig:
        client = await websocket_client(rig)
        first, calls = await called(client, stream_id="a")
        size = rig.gateway.memory.histories.size_bytes
        assert size > len(LINE)
        await whole(client, create([result(calls[0], "x" * 300)], previous_response_id=first, stream_id="a", **TOOLS))
        assert rig.gateway.memory.histories.size_bytes > size + 300
        await leave_all(rig)


@pytest.mark.parametrize("previous", [False, True])
async def test_the_result_of_an_unknown_call_is_refused_by_its_field(previous: bool) -> None:
    async with gateway_rig(worker=Worker(line=LINE), model=CALLING) as rig:
        client = await websocket_client(rig)
        fields = {"previous_response_id": (await called(client))[0]} if previous else {}
        event = await last_event(client, create([result({"call_id": "c"}, "x")], **fields))
        assert (event["type"], event["status"], event["error"]["param"]) == ("error", 400, "input[0].call_id")
        await leave_all(rig)


async def test_a_warm_up_with_tools_can_be_continued() -> None:
    async with gateway_rig(worker=Worker(line=LINE), model=CALLING) as rig:
        client = await websocket_client(rig)
        await client.say(create("Hi", generate=False, **TOOLS))
        events = await client.events()
        assert types(events) == ["response.created", "response.in_progress", "response.completed"]
        warmed = events[-1]["response"]
        assert (warmed["output"], warmed["tools"]) == ([], TOOLS["tools"])
        response = await whole(client, create(whole_line(LINE), previous_response_id=warmed["id"], **TOOLS))
        assert [item["type"] for item in response["output"]] == ["reasoning", "message", *["function_call"] * 2]
        await leave_all(rig)


async def test_a_cancelled_response_is_continued_with_its_whole_calls() -> None:
    line = '[call f]{"a": 1}[/call] and so on for a long time'
    async with gateway_rig(worker=Worker(line=line), model=CALLING) as rig:
        client = await websocket_client(rig)
        await client.say(create("n=500 s=0.02", **TOOLS))
        events = await client.events("response.output_text.delta")
        [call] = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        await client.say({"type": "response.cancel"})
        cancelled = (await client.events())[-1]["response"]
        assert [item["status"] for item in cancelled["output"]] == ["completed", "incomplete"]
        again = create([result(call, "done")], previous_response_id=cancelled["id"], max_output_tokens=2, **TOOLS)
        assert (await whole(client, again))["status"] == "incomplete"
        await leave_all(rig)


async def test_codex_gets_its_turns() -> None:
    line = "[call agents_v__close_agent]{}[/call]"
    namespace = {**CODEX_BODY["tools"][7], "name": "agents_v"}  # type: ignore[index]
    body = {**CODEX_BODY, "model": "tiny", "tools": [*CODEX_BODY["tools"][:7], namespace, CODEX_BODY["tools"][8]]}  # type: ignore[index]
    async with gateway_rig(worker=Worker(line=line), model=CALLING) as rig:
        rig.gateway.leave_out_tools = frozenset({"web_search"})
        client = await websocket_client(rig)
        warmed = await whole(client, {"type": "response.create", "generate": False, **body})
        asked = [{"role": Role.USER.value, "content": whole_line(line)}]
        turn = {"type": "response.create", **body, "input": asked, "previous_response_id": warmed["id"]}
        response = await whole(client, turn)
        [call] = response["output"]
        assert (call["name"], call["namespace"]) == ("close_agent", "agents_v")
        assert response["left_out_tools"] == ["web_search"]
        given = {**turn, "input": [{**result(call, "closed"), "id": "x"}], "previous_response_id": response["id"]}
        assert (await whole(client, given))["status"] == "completed"
        await leave_all(rig)
