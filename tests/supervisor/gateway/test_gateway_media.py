"""Images through every API of the gateway: what reaches the processor, what is counted, and what no log has."""

from __future__ import annotations

import gc
import json
import logging
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.lowlevel
from trio.testing import MockClock

from protocol.messages.media import Detail, Media, Modality
from supervisor.gateway.http.request import BODY_BYTES_FREE
from supervisor.gateway.http.request_reader import BYTES_A_TURN, BYTES_FREE
from supervisor.gateway.turns import LONG_BODIES_A_TURN
from tests.rig.gateway import Client, create, gateway_rig, leave_all, post
from tests.rig.log_records import log_records
from tests.rig.seeing import PNG, WEB, chat_parts, let_see, response_parts
from tests.rig.sockets import gateway_websocket, last_event, output_text, websocket_client, whole

CAT = PNG + "A" * 500_000  # long enough to be parsed in a thread
SECRET = "quetzalcoatl" * 5  # in URLs that no log may have


def conversation(*parts: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": parts}]


def chat_body(*urls: str, **fields: Any) -> dict[str, object]:
    return {
        "model": "tiny",
        "messages": conversation({"type": "text", "text": "compare"}, *chat_parts(*urls)),
        **fields,
    }


def response_body(*urls: str, **fields: Any) -> dict[str, object]:
    parts = ({"type": "input_text", "text": "compare"}, *response_parts(*urls))
    return {"model": "tiny", "input": conversation(*parts), **fields}


async def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds, which no event reports; a connection is closed for its idleness much later."""
    with trio.fail_after(60.0):
        while not holds():  # noqa: ASYNC110
            await trio.sleep(0.01)


def seen(url: str, param: str) -> Media:
    return Media(Modality.IMAGE, url, Detail.AUTO, param)


async def answer_of(client: Client, api: str, *urls: str) -> tuple[str, int]:
    """Return the text and the prompt's tokens by an API; the client of `socket` is a WebSocket's."""
    match api:
        case "chat":
            body = (await client.ask(post(chat_body(*urls)))).json
            return body["choices"][0]["message"]["content"], body["usage"]["prompt_tokens"]
        case "chat stream":
            reply = await client.ask(post(chat_body(*urls, stream=True, stream_options={"include_usage": True})))
            return reply.text, reply.chunks[-1]["usage"]["prompt_tokens"]
        case "responses":
            body = (await client.ask(post(response_body(*urls), "/v1/responses"))).json
            return body["output"][0]["content"][0]["text"], body["usage"]["input_tokens"]
        case _:
            await client.say({"type": "response.create", **response_body(*urls)})
            events = await client.events()
            return output_text(events), events[-1]["response"]["usage"]["input_tokens"]


@pytest.mark.parametrize("api", ["chat", "chat stream", "responses", "socket"])
async def test_images_reach_the_processor_and_usage_counts_their_tokens(api: str, rather_slow: MockClock) -> None:
    async with gateway_rig() as rig:
        seeing = let_see(rig)
        client = await (websocket_client(rig) if api == "socket" else rig.client())
        assert await answer_of(client, api, CAT, WEB) == ("2 images", 20)
        [request] = seeing.asked
        paths = [f"messages[0].content[{place}].image_url.url" for place in (1, 2)]
        if not api.startswith("chat"):
            paths = [f"input[0].content[{place}].image_url" for place in (1, 2)]
        [turn] = request.turns
        assert turn.content == ("compare", seen(CAT, paths[0]), seen(WEB, paths[1]))
        await leave_all(rig)


@pytest.mark.parametrize("api", ["chat", "responses", "socket"])
async def test_a_model_of_text_refuses_images_by_the_name_of_their_field(api: str, rather_slow: MockClock) -> None:
    async with gateway_rig() as rig:
        if api == "socket":
            last = await last_event(await websocket_client(rig), {"type": "response.create", **response_body(WEB)})
            status, error = last["status"], last["error"]
        else:
            body, path = (chat_body, "/v1/chat/completions") if api == "chat" else (response_body, "/v1/responses")
            reply = await (await rig.client()).ask(post(body(WEB), path))
            status, error = reply.status, reply.error
        assert (status, error["code"]) == (400, "unsupported_parameter")
        named = "messages[0].content[1].image_url.url" if api == "chat" else "input[0].content[1].image_url"
        assert error["param"] == named
        assert "images" in error["message"]
        assert rig.worker.asked == []
        await leave_all(rig)


async def test_images_are_refused_where_tokens_are_only_counted(rather_slow: MockClock) -> None:
    async with gateway_rig() as rig:
        reply = await (await rig.client()).ask(post({"messages": chat_body(WEB)["messages"]}, "/tokenize"))
        assert (reply.status, reply.error["code"]) == (400, "unsupported_parameter")
        assert reply.error["param"] == "messages[0].content"


# Memory --------------------------------------------------------------------------------------------


async def test_the_memory_of_images_is_reserved_until_the_answer_is_whole(rather_slow: MockClock) -> None:
    async with gateway_rig() as rig:
        seeing, client = let_see(rig), await rig.client()
        seeing.going = trio.Event()
        body = json.dumps(chat_body(CAT)).encode()
        await client.send(post(body))
        await until(lambda: bool(seeing.asked))
        assert rig.gateway.memory.bodies.reserved_bytes == len(body) - BODY_BYTES_FREE
        seeing.going.set()
        assert (await client.reply()).status == 200
        await leave_all(rig)
        assert rig.gateway.memory.bodies.reserved_bytes == 0


@pytest.mark.parametrize("api", ["chat", "socket"])
async def test_an_idle_connection_keeps_nothing_of_the_images_that_it_sent(api: str, rather_slow: MockClock) -> None:
    async with gateway_rig(history_bytes_max=1000) as rig:
        seeing = let_see(rig)
        client = await (websocket_client(rig) if api == "socket" else rig.client())
        assert (await answer_of(client, api, WEB))[0] == "1 images"
        seeing.asked.clear()
        gc.collect()
        tracemalloc.start()
        try:
            assert (await answer_of(client, api, CAT * 6))[0] == "1 images"
            assert tracemalloc.get_traced_memory()[1] > 6_000_000
            seeing.asked.clear()
            await until(lambda: tracemalloc.get_traced_memory()[0] < 1_000_000)
        finally:
            tracemalloc.stop()
        await leave_all(rig)


async def test_an_image_exists_once_while_its_request_is_answered(rather_slow: MockClock) -> None:
    async with gateway_rig() as rig:
        seeing, client = let_see(rig), await rig.client()
        seeing.going = trio.Event()
        await client.send(post(chat_body(WEB)))
        await until(lambda: len(seeing.asked) == 1)
        tracemalloc.start()
        try:
            other = await rig.client()
            await other.send(post(chat_body(CAT * 6)))
            await until(lambda: len(seeing.asked) == 2)
            await until(lambda: tracemalloc.get_traced_memory()[0] < 7 * len(CAT))
            assert tracemalloc.get_traced_memory()[0] > 6 * len(CAT)
        finally:
            tracemalloc.stop()
        seeing.going.set()
        await leave_all(rig)


async def test_a_body_whose_images_are_too_large_is_told_what_to_do(rather_slow: MockClock) -> None:
    async with gateway_rig(body_bytes_max=100_000, close_s=0.1) as rig:
        reply = await (await rig.client()).ask(post(chat_body(CAT)))
        assert reply.status == 413
        advice = "at most 100000 are read (gateway.limits.body_bytes_max); images may be named by URLs of allowed hosts"
        assert reply.error["message"].endswith(advice)
        client = await websocket_client(rig)
        await client.say({"type": "response.create", **response_body(CAT)})
        code, reason = await client.close_frame()
        assert code == 1009
        assert "100000 (body_bytes_max); images may be named by URLs of allowed hosts" in reason
        await leave_all(rig)


# Conversations that are continued ------------------------------------------------------------------


async def test_a_continued_conversation_has_its_images_by_the_name_of_its_own_field(rather_slow: MockClock) -> None:
    async with gateway_websocket() as (rig, client):
        seeing = let_see(rig)
        first = await whole(client, {"type": "response.create", **response_body(CAT)})
        await trio.lowlevel.checkpoint()
        assert rig.gateway.memory.histories.size_bytes > len(CAT)
        event = {"type": "response.create", **response_body(WEB, previous_response_id=first["id"])}
        second = await whole(client, event)
        assert second["output"][0]["content"][0]["text"] == "2 images"
        named = [media.param for media in seeing.asked[1].media]
        assert named == ["previous_response_id", "input[0].content[1].image_url"]
        assert rig.gateway.memory.histories.size_bytes < 2 * len(CAT), (
            "the same image is counted once in a conversation"
        )
        await leave_all(rig)
        assert rig.gateway.memory.histories.size_bytes == 0


async def test_a_conversation_too_large_to_be_kept_says_which_limit_it_exceeded(rather_slow: MockClock) -> None:
    async with gateway_websocket(history_bytes_max=200_000) as (rig, client):
        let_see(rig)
        first = await whole(client, {"type": "response.create", **response_body(CAT)})
        last = await last_event(client, create("and now?", previous_response_id=first["id"]))
        assert last["error"]["code"] == "previous_response_not_found"
        assert "200000 bytes (history_bytes_max) with their images" in last["error"]["message"]
        await leave_all(rig)


# Logs ----------------------------------------------------------------------------------------------


async def test_no_log_and_no_error_has_a_url_of_a_request(
    caplog: pytest.LogCaptureFixture, rather_slow: MockClock
) -> None:
    secrets = (f"{PNG}{'A' * 100}{SECRET}", f"https://media.example/{'a' * 100}?key={SECRET}")
    with caplog.at_level(logging.DEBUG):
        async with gateway_rig() as rig:
            client, socket, bodies = await rig.client(), await websocket_client(rig), list[bytes]()

            async def send_all() -> None:
                for url in (*secrets, *(f"x{url}" for url in secrets)):
                    bodies.append((await client.ask(post(chat_body(url)))).body)
                    bodies.append((await client.ask(post(response_body(url), "/v1/responses"))).body)
                    await socket.say({"type": "response.create", **response_body(url)})
                    bodies.append(json.dumps(await socket.events()).encode())

            await send_all()  # to a model of text
            seeing = let_see(rig)
            await send_all()
            seeing.bug = True
            await send_all()
            await leave_all(rig)
    assert len(bodies) == 36
    assert not any(SECRET.encode() in body for body in bodies)
    logged = [f"{vars(record)} {caplog.text}" for record in log_records(caplog)]
    assert len(logged) > 20
    assert not any(SECRET in line for line in logged)


# Other clients -------------------------------------------------------------------------------------


async def test_a_few_long_bodies_at_a_time_are_read_and_short_ones_wait_for_none() -> None:
    async with gateway_rig() as rig, trio.open_nursery() as nursery:
        let_see(rig)
        turns = rig.gateway.turns.reading_bodies
        for _ in range(LONG_BODIES_A_TURN):
            await turns.acquire()
        long = await rig.client()
        nursery.start_soon(long.send, post(chat_body(CAT)))
        for _ in range(3):  # each is read as a whole, while the long one waits
            assert (await (await rig.client()).ask(post(chat_body(PNG + "A" * 200_000)))).status == 200
        await until(lambda: rig.gateway.memory.bodies.reserved_bytes + BODY_BYTES_FREE >= BYTES_FREE)
        await trio.sleep(0.1)
        assert rig.gateway.memory.bodies.reserved_bytes + BODY_BYTES_FREE < BYTES_FREE + 2 * BYTES_A_TURN
        for _ in range(LONG_BODIES_A_TURN):
            turns.release()
        assert (await long.reply()).status == 200
        assert turns.value == LONG_BODIES_A_TURN
        await leave_all(rig)
