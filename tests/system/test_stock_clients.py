"""Stock clients work unchanged."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx2
import pytest
import trio
from openai import APIError, BadRequestError, NotFoundError, OpenAI
from websockets.exceptions import ConnectionClosedError, InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin

from tests.rig.embedded_texts import embedding_rig
from tests.rig.gateway import (
    CONTENTS_OF_TINY,
    Worker,
    at_rest,
    chat,
    create,
    gateway_rig,
    ids,
    load_with_fixed_clock,
)
from tests.rig.sockets import output_text
from tests.rig.tools import FILE


def openai_says(url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    wanted: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "n=30"}]}
    whole = client.chat.completions.create(**wanted)
    with client.chat.completions.create(**wanted, stream=True) as stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == whole.choices[0].message.content
    both = client.chat.completions.create(**wanted, n=2)
    assert [choice.message.content for choice in both.choices] == [text, text]
    assert client.completions.create(model="tiny", prompt="n=30", max_tokens=64).choices[0].text == text
    with client.completions.create(model="tiny", prompt="n=30", max_tokens=64, stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == text
    assert client.responses.create(model="tiny", input="n=30").output_text == text
    with client.responses.stream(model="tiny", input="n=30") as stream:
        assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == text
        assert stream.get_final_response().output_text == text
    with client.responses.connect() as connection:
        connection.response.create(model="tiny", input="n=30")
        deltas = []
        for event in connection:
            if event.type == "response.output_text.delta":
                deltas.append(event.delta)
            if event.type == "response.completed":
                assert event.response.output_text == text
                first = event.response.id
                break
        connection.response.create(model="tiny", input="n=2", previous_response_id=first)
        continued = next(event for event in connection if event.type == "response.completed")
        assert continued.response.output_text == "The oak"
    assert "".join(deltas) == text
    with pytest.raises(NotFoundError):
        client.chat.completions.create(model="other", messages=wanted["messages"])
    failing: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "n=9 fail=3"}], "stream": True}
    with pytest.raises(APIError, match="died"), client.chat.completions.create(**failing) as stream:
        list(stream)
    client.close()


def openai_waits(url: str) -> None:
    """Read streams whose first token, and each further one, comes behind comments, and one that fails behind its head."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "n=3 s=0.2"}], "stream": True}
    with client.chat.completions.create(**asked) as stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == "The oak is"
    with client.completions.create(model="tiny", prompt="n=3 s=0.2", max_tokens=9, stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == text
    with client.responses.stream(model="tiny", input="n=3 s=0.2") as stream:
        assert stream.get_final_response().output_text == text
    failing = asked | {"messages": [{"role": "user", "content": "n=3 s=0.2 fail=0"}]}
    with pytest.raises(APIError, match="died"), client.chat.completions.create(**failing) as stream:
        list(stream)
    with client.responses.stream(model="tiny", input="n=3 s=0.2 fail=0") as stream:
        assert [event.type for event in stream] == ["response.created", "response.in_progress", "response.failed"]
    client.close()


def openai_sees_versions(url: str) -> None:
    """Read which weights have computed each answer, of engines that got new ones at its second token."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    split = [{"version": "default", "tokens": 2}, {"version": "step-1", "tokens": 2}]
    asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "n=4"}], "n": 2}
    for choice in client.chat.completions.create(**asked).choices:
        assert choice.model_extra == {"weight_version": "step-1", "weight_versions": split}
    with client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}) as stream:
        ends = [chunk.choices[0] for chunk in stream if chunk.choices and chunk.choices[0].finish_reason]
    assert [end.model_extra for end in ends] == [{"weight_version": "step-1", "weight_versions": split}] * 2
    with client.chat.completions.stream(model="tiny", messages=asked["messages"]) as events:
        assert events.get_final_completion().choices[0].message.content == "The oak is o"
    with client.completions.create(model="tiny", prompt="n=4", stop="is", stream=True) as stream:
        *_, last = (chunk.choices[0] for chunk in stream)
    assert last.model_extra == {"weight_version": "step-1", "weight_versions": [split[0], split[1] | {"tokens": 1}]}
    assert client.responses.create(model="tiny", input="n=4").to_dict()["weight_versions"] == split
    with client.responses.stream(model="tiny", input="n=4") as stream:
        assert stream.get_final_response().to_dict()["weight_version"] == "step-1"
    with client.responses.connect() as connection:
        connection.response.create(model="tiny", input="n=4")
        done = next(event for event in connection if event.type == "response.completed")
        assert done.response.to_dict()["weight_versions"] == split
    client.close()


CALLS = """Let me see.
<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>
<tool_call>{"name": "get_weather", "arguments": {"city": "東京"}}</tool_call>"""
ANSWER = "Both are sunny. ☀"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CITIES = [{"city": "Paris"}, {"city": "東京"}]


def openai_calls_by_chat(client: OpenAI, worker: Worker, *, streamed: bool) -> str | None:
    """Offer a tool, run both calls, send the message back as it was read, and return the answer."""
    tool: Any = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
    messages: list[Any] = [{"role": "user", "content": f"n={len(ids(CALLS))}"}]

    def ask() -> Any:
        if not streamed:
            return client.chat.completions.create(model="tiny", messages=messages, tools=[tool]).choices[0]
        with client.chat.completions.stream(model="tiny", messages=messages, tools=[tool]) as events:
            return events.get_final_completion().choices[0]

    worker.line = CALLS
    first = ask()
    assert (first.finish_reason, first.message.content) == ("tool_calls", "Let me see.")
    assert [json.loads(call.function.arguments) for call in first.message.tool_calls] == CITIES
    messages.append(first.message)
    results = [f"sunny n={len(ids(ANSWER))}"] * 2
    for call, result in zip(first.message.tool_calls, results, strict=True):
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    worker.line = ANSWER
    last = ask()
    assert last.finish_reason == "stop"
    return str(last.message.content)


def openai_calls_by_responses(client: OpenAI, worker: Worker, *, streamed: bool) -> str:
    """Do the same by Responses over HTTP, with all items sent back."""
    tool: Any = {"type": "function", "name": "get_weather", "parameters": CITY, "strict": False}
    items: list[Any] = [{"role": "user", "content": f"n={len(ids(CALLS))}"}]

    def ask() -> Any:
        if not streamed:
            return client.responses.create(model="tiny", input=items, tools=[tool])
        with client.responses.stream(model="tiny", input=items, tools=[tool]) as events:
            return events.get_final_response()

    worker.line = CALLS
    first = ask()
    assert first.output_text == "Let me see."
    items += [*first.output, *results_of(first)]
    worker.line = ANSWER
    return str(ask().output_text)


def openai_calls_by_socket(client: OpenAI, worker: Worker) -> str:
    """Do the same over a WebSocket, with the results alone sent back."""
    tool: Any = {"type": "function", "name": "get_weather", "parameters": CITY, "strict": False}
    worker.line = CALLS
    with client.responses.connect() as connection:
        connection.response.create(model="tiny", input=f"n={len(ids(CALLS))}", tools=[tool])
        first = next(event.response for event in connection if event.type == "response.completed")
        worker.line = ANSWER
        connection.response.create(model="tiny", input=results_of(first), previous_response_id=first.id, tools=[tool])
        return next(event.response.output_text for event in connection if event.type == "response.completed")


def results_of(response: Any) -> list[Any]:
    """Return the results of both calls of a response."""
    calls = [each for each in response.output if each.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == CITIES
    output = f"sunny n={len(ids(ANSWER))}"
    return [{"type": "function_call_output", "call_id": call.call_id, "output": output} for call in calls]


def websockets_says(url: str) -> None:
    address = url.replace("http", "ws") + "/v1/responses"
    with connect(address, ping_interval=0.05, open_timeout=5) as lane:
        for _ in range(2):
            lane.send(json.dumps(create("n=40 s=0.004")))
            events: list[dict[str, Any]] = []
            while not events or events[-1]["type"] != "response.completed":
                events.append(json.loads(lane.recv(timeout=5)))
            assert len(output_text(events)) > 50
        lane.ping().wait(5)
    with pytest.raises(InvalidStatus) as caught:
        connect(address, origin=Origin("https://evil.example"))
    assert caught.value.response.status_code == 403
    with connect(address) as lane, pytest.raises(ConnectionClosedError) as closed:
        lane.send("x" * 5_000_000)
        lane.recv(timeout=5)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1009


def httpx_says(url: str) -> None:
    with httpx2.Client(base_url=url) as client:
        for _ in range(3):
            assert client.get("/health").text == "alive\n"
            assert client.get("/nope").status_code == 404
            assert client.post("/v1/chat/completions", json=chat("n=2")).status_code == 200
        assert client.post("/v1/chat/completions", content=b"x" * 9_000_000).status_code == 413


def openai_embeds(url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    wanted: dict[str, Any] = {"model": "vectors", "input": ["the oak", "elm"]}
    packed = client.embeddings.create(**wanted)
    listed = client.embeddings.create(**wanted, encoding_format="float")
    assert [one.embedding for one in packed.data] == [one.embedding for one in listed.data]
    assert ([one.index for one in packed.data], packed.usage.prompt_tokens) == ([0, 1], 7)
    assert len(client.embeddings.create(**wanted, dimensions=3).data[0].embedding) == 3
    with pytest.raises(BadRequestError, match="must not be empty") as refused:
        client.embeddings.create(model="vectors", input=["oak", ""])
    assert refused.value.param == "input[1]"
    with pytest.raises(BadRequestError, match="ask POST /v1/embeddings"):
        client.chat.completions.create(model="vectors", messages=[{"role": "user", "content": "n=3"}])
    client.close()


OLDER = pytest.mark.filterwarnings("ignore:connect:DeprecationWarning")  # openai calls websockets the older way


@pytest.mark.parametrize("client", [pytest.param(openai_says, marks=OLDER), websockets_says, httpx_says])
async def test_a_stock_client_works(client: Callable[[str], None]) -> None:
    async with gateway_rig() as rig:
        with trio.fail_after(20):
            await trio.to_thread.run_sync(client, rig.url)
        await at_rest(rig)


async def test_openai_gets_vectors_as_base64_and_as_numbers() -> None:
    async with embedding_rig() as each:
        with trio.fail_after(20):
            await trio.to_thread.run_sync(openai_embeds, each.rig.url)
        await at_rest(each.rig)


async def test_openai_reads_streams_with_comments() -> None:
    async with gateway_rig() as rig:
        rig.gateway.keepalive_s = 0.05
        with trio.fail_after(20):
            await trio.to_thread.run_sync(openai_waits, rig.url)
        await at_rest(rig)


@OLDER
async def test_openai_reads_the_versions_of_weights() -> None:
    async with gateway_rig(worker=Worker(version="default", renewed={2: "step-1"})) as rig:
        with trio.fail_after(20):
            await trio.to_thread.run_sync(openai_sees_versions, rig.url)
        await at_rest(rig)


OPENAI_CALLS: dict[str, Callable[[OpenAI, Worker], str | None]] = {
    "chat": partial(openai_calls_by_chat, streamed=False),
    "chat-streamed": partial(openai_calls_by_chat, streamed=True),
    "responses": partial(openai_calls_by_responses, streamed=False),
    "responses-streamed": partial(openai_calls_by_responses, streamed=True),
    "socket": openai_calls_by_socket,
}


@OLDER
@pytest.mark.parametrize("way", OPENAI_CALLS)
async def test_openai_runs_two_tools_and_reads_the_answer(way: str) -> None:
    worker, model = Worker(), load_with_fixed_clock(CONTENTS_OF_TINY, FILE.read_text())
    async with gateway_rig(worker=worker, model=model) as rig:
        client = OpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0)
        with trio.fail_after(20):
            assert await trio.to_thread.run_sync(OPENAI_CALLS[way], client, worker) == ANSWER
        client.close()
        await at_rest(rig)
