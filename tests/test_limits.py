"""Each limit of the door holds at its number: what reaches it passes, one more is refused with a status and a sentence."""

from __future__ import annotations

import json

import attrs
import pytest
import trio

from supervisor import config
from supervisor.doors.door import DoorLimits
from tests.doors import Client, at_rest, chat, create, head, post, rig

SOON = 0.3


def padded(size: int) -> bytes:
    """A chat request whose body is exactly so long."""
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "n=2"}]}'
    return body[:-1] + b" " * (size - len(body)) + b"}"


@pytest.mark.parametrize(("size", "status"), [(199, 200), (200, 200), (201, 413)])
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body(size, status, chunked):
    async with rig(body_bytes_max=200) as made:
        client = await made.client()
        data = padded(size)
        if chunked:
            start = head("POST", "/v1/chat/completions", transfer_encoding="chunked")
            await client.send(start + b"%x\r\n%s\r\n0\r\n\r\n" % (size, data))
            reply = await client.reply()
        else:
            reply = await client.ask(post(data))
        assert reply.status == status
        if status == 413:
            assert "200" in reply.error["message"]
            assert reply.headers["x-should-retry"] == "false"


async def test_a_head():
    async with rig(head_bytes_max=4096) as made:
        small = head("GET", "/health", x="y" * (4096 - len(head("GET", "/health", x=""))))
        assert len(small) == 4096
        assert (await (await made.client()).ask(small)).status == 200
        client = await made.client()
        await client.send(head("GET", "/health", x="y" * 70_000))
        reply = await client.reply()
        assert (reply.status, reply.error["code"]) == (431, "too_large")


async def test_requests_in_flight_and_those_who_wait():
    async with rig(requests_max=1, waiting_max=1, admit_s=SOON) as made:
        inside, waiting, third = [await made.client() for _ in range(3)]
        await inside.send(post(chat("n=900 s=0.05", stream=True)))
        await made.worker.began.wait()
        before = trio.current_time()
        async with trio.open_nursery() as nursery:
            replies = []

            async def wait():
                replies.append(await waiting.ask(post(chat())))
                replies.append(trio.current_time() - before)

            nursery.start_soon(wait)
            while made.door.gate.waiting == 0:  # noqa: ASYNC110  # it comes over a socket
                await trio.sleep(0.01)
            refused = await third.ask(post(chat()))
            assert (refused.status, refused.headers["retry-after"]) == (503, "1")
            assert refused.error["message"] == "1 requests are being served and 1 wait"
        assert replies[0].status == 503
        assert f"within {SOON} s" in replies[0].error["message"]
        assert SOON <= replies[1] < 5
        await inside.stream.aclose()
        made.hang_up()
        await at_rest(made)


@pytest.mark.parametrize("limit", ["head_s", "idle_s", "body_s"])
async def test_how_long_a_request_may_take_to_come(limit):
    async with rig(**{limit: SOON}) as made:
        client = await made.client()
        if limit == "idle_s":
            assert (await client.ask(head("GET", "/health"))).status == 200
        before = trio.current_time()
        start = {"head_s": b"GET /health HT", "idle_s": b"", "body_s": post(chat())[:-5]}[limit]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(drip, client, start)
            with trio.fail_after(10):
                while await client.more():
                    pass
            assert SOON * 0.9 <= trio.current_time() - before < 5
            nursery.cancel_scope.cancel()
        made.hang_up()
        await at_rest(made)


async def drip(client, start: bytes) -> None:
    """Send the beginning, and then a byte now and then, as a slow attack does: no byte may buy more time."""
    for byte in start:
        await client.send(bytes([byte]))
        await trio.sleep(0.02 if byte == start[-1] else 0)


async def test_the_total_time_of_a_request_and_of_its_first_token():
    async with rig(total_s=SOON) as made:
        reply = await (await made.client()).ask(post(chat("n=900 s=0.05")))
        assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "deadline_exceeded", "1")
        assert f"longer than {SOON} s" in reply.error["message"]
        assert (await (await made.client()).ask(post(chat()))).status == 200
        made.hang_up()
        await at_rest(made)


@pytest.mark.parametrize("name", [each.name for each in attrs.fields(DoorLimits)])
def test_every_limit_of_the_door_has_a_name_in_the_file_and_a_sane_default(name):
    assert getattr(config.GatewaySection().limits, name) > 0
    unit = name.removesuffix("_max").rpartition("_")[2]
    assert name.endswith(("_max", "_s", "_bytes")), unit


@pytest.mark.parametrize(("size", "fine"), [(1999, True), (2000, True), (2001, False)])
async def test_a_message(size, fine):
    async with rig(body_bytes_max=2000) as made:
        client = await made.client()
        assert (await client.upgrade()).status == 101
        event = json.dumps(create("n=2")).encode()
        await client.say(event[:-1] + b" " * (size - len(event)) + b"}")
        if fine:
            assert (await client.events())[-1]["type"] == "response.completed"
        else:
            assert await client.close_code() == 1009


@pytest.mark.parametrize("websocket", [False, True])
async def test_a_backlog_drops_the_client_aborts_its_request_and_is_counted(websocket):
    async with rig(backlog_bytes_max=20_000, send_buffer_bytes=4096, close_s=0.2) as made:
        made.worker.line = "The oak is old. " * 50
        client = Client(await made.connect(receive_buffer=4096))
        if websocket:
            assert (await client.upgrade()).status == 101
            await client.say(create("n=1900 s=0.0001"))
        else:
            await client.send(post(chat("n=1900 s=0.0001", stream=True)))
        with trio.fail_after(20):
            await at_rest(made)
        assert made.worker.left == 1
        assert b'espalier_clients_dropped_total{reason="backlog"} 1.0' in made.metrics.text({})


async def test_a_client_that_reads_everything_is_never_dropped_however_small_its_backlog():
    async with rig(backlog_bytes_max=20_000, send_buffer_bytes=4096) as made:
        made.worker.line = "The oak is old. " * 50
        reply = await (await made.client()).ask(post(chat("n=1900 s=0.0001", stream=True)))
        assert reply.events[-1] == "[DONE]"
        assert b"espalier_clients_dropped_total{" not in made.metrics.text({})
