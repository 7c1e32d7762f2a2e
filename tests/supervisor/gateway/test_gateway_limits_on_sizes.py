"""Each limit on sizes: what reaches it is accepted, one more is refused with a status and a sentence."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock

from actors.text.limits import PromptLimits
from protocol.messages.cluster import Leg, Offer
from protocol.messages.text import Role, Turn
from supervisor.cluster import models
from supervisor.cluster.directory import Directory
from supervisor.config.limits import ClientLimits
from supervisor.engines.kind import NodeContext
from supervisor.engines.kinds import read_cluster
from supervisor.gateway.histories import Conversation
from supervisor.node.gateway_children import make_gateway
from supervisor.node.pools import PoolView
from supervisor.telemetry.metrics import Metrics
from tests.rig.assembly import everybody
from tests.rig.gateway import (
    FOLDER,
    INFO,
    Client,
    Rig,
    at_rest,
    chat,
    create,
    frame,
    gateway_client,
    gateway_rig,
    head,
    post,
)
from tests.rig.sockets import gateway_websocket, last_event, websocket_client, whole

OF_THE_LIMITS = [field.name for field in attrs.fields(ClientLimits)]
OF_THE_GATEWAY = ["requests_max", "waiting_max", "admit_s", "first_token_s", "total_s", "prompt_tokens_max"]
AROUND = [(-1, True), (0, True), (1, False)]  # how much more than the limit, and whether it is served


# Names ---------------------------------------------------------------------------------------------


def test_the_limits_of_the_file_reach_the_gateway(written: Callable[[str], Path]) -> None:
    numbers: dict[str, float] = {name: 1000 + place for place, name in enumerate(OF_THE_GATEWAY + OF_THE_LIMITS)}
    lines = [f"{name} = {number}" for name, number in numbers.items()]
    text = "\n".join(["[gateway]", *lines[: len(OF_THE_GATEWAY)], "[gateway.limits]", *lines[len(OF_THE_GATEWAY) :]])
    text += f"\n[model.tiny]\npath = '{FOLDER}'\n[engine.a]\nmodel = 'tiny'\nkind = 'simulated'\nkv_tokens_max = 1024\n"
    cluster = read_cluster(written(text))
    runtime: Any = SimpleNamespace(
        metrics=Metrics(),
        new_id=lambda: "0" * 32,
        now=lambda: 0.0,
        strftime=str,
        run_in_thread=None,
        reserve=None,
        spans=None,
    )
    context = NodeContext(cluster, "main", runtime, Directory("main"))
    gateway = make_gateway(context, {}, PoolView(cluster, context.directory, {}, {}), tuple, everybody())
    kept = {name: getattr(gateway.limits, name) for name in OF_THE_LIMITS}
    kept |= {name: getattr(gateway.gate, name) for name in ("requests_max", "waiting_max", "admit_s")}
    kept |= {name: getattr(gateway.runner, name) for name in ("first_token_s", "total_s")}
    assert kept | {"prompt_tokens_max": cluster.gateway.prompt_tokens_max} == numbers


@pytest.mark.parametrize(("most", "kept"), [(99, 99), (100, 100), (101, 100)])
def test_a_prompt_is_limited_by_the_gateway_and_by_the_smallest_engine(most: int, kept: int) -> None:
    engines = [attrs.evolve(INFO, request_tokens_max=size) for size in (300, 100, 200)]
    offers = [Offer(f"e{place}", "tiny", Leg.BOTH, 4, True, each) for place, each in enumerate(engines)]
    directory = Directory("main")
    directory.configure("other", None, offers)
    limits = models.request_limits(directory, "tiny", most)
    assert limits is not None
    assert (limits.total_max, limits.prompt_max) == (100, kept)


# Heads, bodies and messages ------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4095, 4096, 4097, 20_000, 60_000])
@pytest.mark.parametrize("pieces", [1, 2, 50])
async def test_a_head_beyond_head_bytes_max_is_refused(size: int, pieces: int, rather_slow: MockClock) -> None:
    data = head("GET", "/health", x="y" * (size - len(head("GET", "/health", x=""))))
    assert len(data) == size
    async with gateway_client(head_bytes_max=4096, close_s=0.1) as (rig, client):
        for place in range(pieces):
            await client.send(data[size * place // pieces : size * (place + 1) // pieces])
            await trio.sleep(0.001)
        reply = await client.reply()
        if size <= 4096:
            assert reply.status == 200
        else:
            assert (reply.status, reply.error["code"], reply.headers["connection"]) == (431, "too_large", "close")
            assert (reply.headers["x-should-retry"], "retry-after" in reply.headers) == ("false", False)
        await client.stream.aclose()
        await at_rest(rig)


def padded(size: int) -> bytes:
    """Return the body of a chat request, padded to a size."""
    body = json.dumps(chat("n=2")).encode()
    return body[:-1] + b" " * (size - len(body)) + b"}"


@pytest.mark.parametrize(("more", "fine"), AROUND)
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_beyond_body_bytes_max_is_refused(
    more: int, fine: bool, chunked: bool, rather_slow: MockClock
) -> None:
    async with gateway_rig(body_bytes_max=200) as rig:
        client = await rig.client()
        data = padded(200 + more)
        if chunked:
            start = head("POST", "/v1/chat/completions", transfer_encoding="chunked")
            reply = await client.ask(start + b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data))
        else:
            reply = await client.ask(post(data))
        if fine:
            assert reply.status == 200
        else:
            assert (reply.status, reply.error["code"], reply.headers["x-should-retry"]) == (413, "too_large", "false")
            message = "longer than 200 bytes" if chunked else "201 bytes long; at most 200 are read"
            assert message in reply.error["message"]
            assert "retry-after" not in reply.headers


@pytest.mark.parametrize(("more", "fine"), AROUND)
@pytest.mark.parametrize("pieces", [1, 2, 7])
async def test_a_message_beyond_body_bytes_max_closes_with_1009(
    more: int, fine: bool, pieces: int, rather_slow: MockClock
) -> None:
    async with gateway_websocket(body_bytes_max=2000) as (_, client):
        event = json.dumps(create("n=2")).encode()
        event = event[:-1] + b" " * (2000 + more - len(event)) + b"}"
        cuts = [len(event) * place // pieces for place in range(pieces + 1)]
        for place in range(pieces):
            kind = (0x00 if place else 0x01) | (0x80 if place == pieces - 1 else 0)
            await client.send(frame(event[cuts[place] : cuts[place + 1]], kind))
        if fine:
            assert (await client.events())[-1]["type"] == "response.completed"
        else:
            kind, payload = await client.frame()
            assert (kind, int.from_bytes(payload[:2], "big")) == (0x88, 1009)
            assert b"2000" in payload


# Tokens of a prompt --------------------------------------------------------------------------------

APIS: dict[str, tuple[str, Callable[..., Any]]] = {  # the field of the prompt, and a request
    "/v1/chat/completions": ("messages", lambda **more: chat("word " * 20 + "n=1", **more)),
    "/v1/completions": ("prompt", lambda **more: {"model": "tiny", "prompt": [7] * 30, **more}),
    "/v1/responses": ("input", lambda **more: {"model": "tiny", "input": "word " * 20 + "n=1", **more}),
    "socket": ("input", lambda **more: create("word " * 20 + "n=1", **more)),
}


async def asked(rig: Rig, client: Client, api: str, **more: int) -> tuple[Any, Any]:
    """Return the answer of an API, or None, and its error, or None."""
    body = APIS[api][1](**more)
    if api != "socket":
        reply = await client.ask(post(body, api))
        if reply.status == 200:
            return reply.json, None
        assert (reply.status, reply.headers["x-should-retry"]) == (400, "false")
        assert "retry-after" not in reply.headers
        return None, reply.error
    last = await last_event(client, body)
    if last["type"] != "error":
        return last["response"], None
    assert last["status"] == 400
    assert "headers" not in last
    return None, last["error"]


@asynccontextmanager
async def prompted(api: str) -> AsyncIterator[tuple[Rig, Client, int]]:
    """Run a gateway, and yield it with a client of an API and the tokens of the prompt that `asked` sends."""
    async with gateway_rig() as rig:
        client = await (websocket_client(rig) if api == "socket" else rig.client())
        answer, _ = await asked(rig, client, api)
        yield rig, client, answer["usage"].get("prompt_tokens", answer["usage"].get("input_tokens"))


TOO_LONG: dict[str, tuple[Callable[[int], tuple[int, int]], str]] = {  # a prompt's size -> both limits; a message
    "prompt": (lambda size: (2048, size), "{size} tokens long, and prompts here can have {less}"),
    "answer": (lambda size: (size + 16, 2048), "{size} tokens long, and 16 more are asked for; together they can have"),
    "room": (lambda size: (size + 1, 2048), "{size} tokens long, and prompt and answer together can have {size}"),
}


@pytest.mark.parametrize(("more", "fine"), AROUND)
@pytest.mark.parametrize(
    ("limit", "api"),  # a completion always asks for some tokens
    [(limit, api) for limit in TOO_LONG for api in APIS if (limit, api) != ("room", "/v1/completions")],
)
async def test_a_prompt_beyond_a_limit_of_its_tokens_is_refused(
    limit: str, api: str, more: int, fine: bool, rather_slow: MockClock
) -> None:
    async with prompted(api) as (rig, client, size):
        limits, message = TOO_LONG[limit]
        total_max, prompt_max = limits(size)
        rig.limits[0] = PromptLimits(INFO, total_max - more, prompt_max - more)
        answer_max = "max_output_tokens" if APIS[api][0] == "input" else "max_tokens"
        answer, error = await asked(rig, client, api, **({answer_max: 16} if limit == "answer" else {}))
        if fine:
            assert answer is not None
        else:
            param = answer_max if limit == "answer" else APIS[api][0]
            assert (error["code"], error["param"]) == ("context_length_exceeded", param)
            assert message.format(size=size, less=size - 1) in error["message"]
            assert len(rig.worker.prompts) == 1
        rig.limits[0] = PromptLimits(INFO, 2048, 2048)
        assert (await asked(rig, client, api))[0] is not None  # a mistake costs its answer and nothing else


async def test_each_prompt_of_a_list_is_limited_by_itself(rather_slow: MockClock) -> None:
    async with gateway_rig() as rig:
        rig.limits[0] = PromptLimits(INFO, 2048, 30)
        client = await rig.client()
        body = {"model": "tiny", "max_tokens": 1}
        reply = await client.ask(post(body | {"prompt": [[7] * 30, [7] * 29, [7] * 30]}, "/v1/completions"))
        assert len(reply.json["choices"]) == 3
        reply = await client.ask(post(body | {"prompt": [[7] * 30, [7] * 31]}, "/v1/completions"))
        assert (reply.status, reply.error["param"]) == (400, "prompt")
        assert reply.error["message"] == "prompt 1 is 31 tokens long, and prompts here can have 30"


# History of a connection ---------------------------------------------------------------------------


@pytest.mark.parametrize(("more", "fine"), AROUND)
@pytest.mark.parametrize("lanes", ["a", "ab", "abcde"])
async def test_a_history_beyond_history_bytes_max_forgets_the_oldest(
    lanes: str, more: int, fine: bool, rather_slow: MockClock
) -> None:
    prompt = "x" * 50 + " n=1"
    size = Conversation.after(None, "", Turn(Role.USER, prompt), Turn(Role.ASSISTANT, "The")).size_bytes
    async with gateway_websocket(history_bytes_max=size * len(lanes) - more) as (rig, client):
        ids = {lane: (await whole(client, create(prompt, stream_id=lane)))["id"] for lane in lanes}
        last = await last_event(client, create(prompt, stream_id="a", previous_response_id=ids["a"]))
        if fine:
            assert last["type"] == "response.completed"
            assert rig.worker.prompts[-1].count(prompt) == 2
        else:
            assert (last["status"], last["error"]["code"]) == (400, "previous_response_not_found")
            assert (last["error"]["param"], last.get("headers")) == ("previous_response_id", None)
            assert f"'{ids['a']}' not found" in last["error"]["message"]
            for lane in lanes[1:2]:  # the oldest conversation was forgotten, and no other
                await client.say(create("n=1", previous_response_id=ids[lane], stream_id=lane))
                assert (await client.events())[-1]["type"] == "response.completed"
        assert (await whole(client, create("n=1", stream_id="a")))["status"] == "completed"


# Backlogs ------------------------------------------------------------------------------------------
