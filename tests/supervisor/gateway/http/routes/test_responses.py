"""Responses over HTTP with tools: what the model gets, and the items of its answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.rig.calling import CALLING, FUNCTION, NAMESPACE, whole_line
from tests.rig.gateway import TINY, Client, Reply, Rig, Worker, gateway_rig, leave_all, response
from tests.rig.marked_format import Marked

LINE = '[think]Old?[/think]Oak. [call f]{"a": 1}[/call][call n__g]{}[/call] Yes.'
ITEMS = [
    ("reasoning", "Old?"),
    ("message", "Oak. "),
    ("function_call", '{"a": 1}'),
    ("function_call", "{}"),
    ("message", " Yes."),
]
SEARCH = {"type": "web_search", "external_web_access": True}


@pytest.fixture(autouse=True)
def _format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.text.choices.make_stage", lambda *_: Marked())


def text_of(item: dict[str, Any]) -> str:
    text: str = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
    return text


def sent(reply: Reply) -> list[Any]:
    """Return the events of a stream."""
    return [json.loads(line[6:]) for line in reply.body.decode().split("\n") if line.startswith("data: ")]


async def answered(client: Client, prompt: Any, **fields: Any) -> Any:
    """Return the response to a request, streamed or not."""
    reply = await client.ask(response(prompt, **fields))
    assert reply.status == 200, reply.body
    return sent(reply)[-1]["response"] if fields.get("stream") else reply.json


def prompt_of(rig: Rig) -> str:
    return TINY.tokenizer.decode(rig.worker.asked[-1].tokens, skip_special_tokens=False)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_has_its_items_in_their_order(stream: bool) -> None:
    async with gateway_rig(worker=Worker(line=LINE), model=CALLING) as rig:
        client = await rig.client()
        whole = await answered(client, whole_line(LINE), stream=stream, tools=[FUNCTION, NAMESPACE])
        assert [(item["type"], text_of(item)) for item in whole["output"]] == ITEMS
        assert {item["status"] for item in whole["output"]} == {"completed"}
        calls = [(item["name"], item.get("namespace")) for item in whole["output"] if item["type"] == "function_call"]
        assert calls == [("f", None), ("g", "n")]
        assert whole["tools"] == [FUNCTION, NAMESPACE]
        prompt = prompt_of(rig)
        assert '"name": "f"' in prompt
        assert '"name": "n__g"' in prompt
        await leave_all(rig)


async def test_a_stream_has_an_event_for_each_piece_of_each_item() -> None:
    async with gateway_rig(worker=Worker(line=LINE), model=CALLING) as rig:
        reply = await (await rig.client()).ask(response(whole_line(LINE), stream=True, tools=[FUNCTION, NAMESPACE]))
        events = sent(reply)
        assert [event["sequence_number"] for event in events] == [*range(len(events))]
        for index, (kind, text) in enumerate(ITEMS):
            deltas = [event for event in events if "delta" in event and event["output_index"] == index]
            assert "".join(event["delta"] for event in deltas) == text
            name = {"message": "output_text", "reasoning": "reasoning_text"}.get(kind, "function_call_arguments")
            assert {event["type"] for event in deltas} == {f"response.{name}.delta"}
        await leave_all(rig)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_items_of_an_answer_can_be_given_back_with_the_results_of_its_calls(stream: bool) -> None:
    async with gateway_rig(worker=Worker(line=LINE), model=CALLING) as rig:
        client, tools = await rig.client(), [FUNCTION, NAMESPACE]
        first = await answered(client, whole_line(LINE), stream=stream, tools=tools)
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": f"result {item['name']}"}
            for item in first["output"]
            if item["type"] == "function_call"
        ]
        items = [{"role": "user", "content": "Hi"}, *first["output"], *results, {"role": "user", "content": "n=2"}]
        assert (await answered(client, items, tools=tools))["status"] == "completed"
        prompt = prompt_of(rig)
        for shown in ("Oak.  Yes.", '{"name": "f", "arguments": {"a": 1}}', '{"name": "n__g", "arguments": {}}'):
            assert shown in prompt
        assert prompt.index("result f") < prompt.index("result g")
        await leave_all(rig)


async def test_the_result_of_an_unknown_call_is_refused_by_its_field() -> None:
    async with gateway_rig(model=CALLING) as rig:
        items = [{"role": "user", "content": "Hi"}, {"type": "function_call_output", "call_id": "c", "output": "x"}]
        reply = await (await rig.client()).ask(response(items))  # type: ignore[arg-type]
        assert (reply.status, reply.error["param"]) == (400, "input[1].call_id")
        assert rig.worker.asked == []
        await leave_all(rig)


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_of_other_servers_are_refused_or_left_out_as_the_operator_decides(stream: bool) -> None:
    async with gateway_rig(model=CALLING) as rig:
        client = await rig.client()
        refused = await client.ask(response(stream=stream, tools=[FUNCTION, SEARCH]))
        assert (refused.status, refused.error["param"], refused.error["code"]) == (
            400,
            "tools[1].type",
            "unsupported_parameter",
        )
        rig.gateway.leave_out_tools = frozenset({"web_search"})
        whole = await answered(client, "n=2", stream=stream, tools=[SEARCH, FUNCTION])
        assert (whole["tools"], whole["left_out_tools"]) == ([FUNCTION], ["web_search"])
        assert "left_out_tools" not in await answered(client, "n=2", stream=stream, tools=[FUNCTION])
        document = (await client.ask(b"GET /openapi.json HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")).json
        assert '"enum":["web_search"]' in json.dumps(document["components"]["schemas"]["CreateHttp"]).replace(" ", "")
        await leave_all(rig)


async def test_tools_are_refused_by_name_for_a_model_without_a_format_of_calls() -> None:
    async with gateway_rig() as rig:
        reply = await (await rig.client()).ask(response(tools=[FUNCTION]))
        assert (reply.status, reply.error["param"]) == (400, "tools")
        await leave_all(rig)
