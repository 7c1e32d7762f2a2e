"""What a stream sends while nothing comes from its engine: its head after 5 s, then comments, then the truth."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing
from attrs import evolve
from trio.testing import MockClock

from actors.kit.calls import Answer
from actors.processor import TextReply, TextRequest, TextResult
from protocol.errors import EngineLost
from protocol.messages.generation import RouteTaken
from supervisor.gateway.http.response import HttpResponse
from supervisor.gateway.open_streams import COMMENT, HEAD_WITHIN_S, LOOKS, LOOKS_A_TURN
from tests.rig.gateway import Client, Rig, Worker, chat, gateway_client, gateway_rig, leave_all, post, response, text

KEEPALIVE_S = 15.0
LATEST_S = KEEPALIVE_S * (1 + 2 / LOOKS)


def chats(prompt: str) -> bytes:
    return post(chat(prompt, stream=True))


def completes(prompt: str) -> bytes:
    return text(prompt, stream=True)


def echoes(prompt: str) -> bytes:
    return text(prompt, stream=True, echo=True)


def responds(prompt: str) -> bytes:
    return response(prompt, stream=True)


ASKS = pytest.mark.parametrize("ask", [chats, completes, echoes, responds])
CHOICES = pytest.mark.parametrize("ask", [chats, completes, echoes])


@asynccontextmanager
async def slow_rig(**fields: Any) -> AsyncIterator[tuple[Rig, Client]]:
    worker = Worker(route=RouteTaken("a", 0))
    async with gateway_client(worker=worker, first_token_s=600, **fields) as (rig, client):
        yield rig, client
        await leave_all(rig)
        assert not rig.gateway.streams._open  # noqa: SLF001  # nothing public needs it


class Unprepared:
    """A processor that fails after 6 s, before it has accepted anything."""

    @asynccontextmanager
    async def ask(self, request: TextRequest, credit: int) -> AsyncIterator[Answer[TextReply, TextResult]]:
        answer: Answer[TextReply, TextResult] = Answer(credit)
        await trio.sleep(6)
        answer.fail(EngineLost("the engine died"))
        yield answer


def parts(body: bytes) -> list[str]:
    """Return the events and comments of a body, which must be whole."""
    listed = body.decode().split("\n\n")
    assert listed.pop() == ""
    return listed


def types_of(events: list[str]) -> list[str]:
    return [json.loads(event.rpartition("data: ")[2])["type"] for event in events if not event.startswith(":")]


@pytest.mark.parametrize("ask", [chats, completes])
async def test_a_head_leaves_5_s_after_admission_and_comments_follow_until_the_first_token(
    ask: Any, rather_slow: MockClock
) -> None:
    async with slow_rig() as (_, client):
        began = trio.current_time()
        await client.send(ask("n=2 s=70"))
        await client.until(b" 200 OK\r\n")
        assert trio.current_time() - began == pytest.approx(HEAD_WITHIN_S, abs=1e-6)
        head = await client.until(b"\r\n\r\n")
        assert b"x-accel-buffering: no" in head.lower()
        assert b"x-route" not in head.lower()
        for _ in range(4):
            before = trio.current_time()
            size = int(await client.until(b"\r\n"), 16)
            assert (await client.exactly(size), await client.exactly(2)) == (COMMENT, b"\r\n")
            assert KEEPALIVE_S - 1e-6 <= trio.current_time() - before <= LATEST_S + 1e-6
        await client.until(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert trio.current_time() - began == pytest.approx(140, abs=0.1)


@ASKS
async def test_comments_stand_between_whole_events_and_change_none(ask: Any, rather_slow: MockClock) -> None:
    async with slow_rig() as (_, client):
        quick, slow = await client.ask(ask("n=3 s=00")), await client.ask(ask("n=3 s=40"))
        assert (quick.status, quick.whole, slow.status, slow.whole) == (200, True, 200, True)
        # The others begin before the engine is chosen.
        assert ask in {echoes, responds} or "x-route" in quick.headers
        assert COMMENT not in quick.body
        assert slow.body.count(COMMENT) == 6
        with_content = [part for part in parts(slow.body) if not part.startswith(":")]
        assert [len(part) // 20 for part in with_content] == [len(part) // 20 for part in parts(quick.body)]


@ASKS
async def test_a_stream_that_sends_often_enough_has_no_comment(ask: Any, rather_slow: MockClock) -> None:
    async with slow_rig() as (_, client):
        assert COMMENT not in (await client.ask(ask("n=6 s=14.9"))).body


@pytest.mark.parametrize("keepalive_s", [0.0, 1.0, 300.0])
async def test_keepalive_s_is_the_silence_before_a_comment_and_0_is_none(
    keepalive_s: float, rather_slow: MockClock
) -> None:
    async with slow_rig() as (rig, client):
        rig.gateway.keepalive_s = keepalive_s
        await client.send(chats("n=1 s=65"))
        await client.until(b" 200 OK\r\n")
        assert trio.current_time() == pytest.approx({0.0: 5, 1.0: 1, 300.0: 5}[keepalive_s], abs=0.01)
        client.buffer = b"HTTP/1.1 200 OK\r\n" + client.buffer
        comments = (await client.reply()).body.count(COMMENT)
        assert comments in {0.0: [0], 1.0: range(51, 65), 300.0: [0]}[keepalive_s]


@CHOICES
@pytest.mark.parametrize(("after_s", "status"), [(4.9, 503), (5.1, 200)])
async def test_an_error_keeps_its_status_for_5_s_and_is_an_event_from_then_on(
    ask: Any, after_s: float, status: int, rather_slow: MockClock
) -> None:
    async with slow_rig() as (_, client):
        reply = await client.ask(ask(f"n=1 s={after_s} fail=0"))
        if ask is echoes:
            # Its head leaves with the echo.
            status = 200
        assert (reply.status, reply.whole) == (status, status == 503)
        error = json.loads(reply.body if status == 503 else parts(reply.body)[-1].removeprefix("data: "))["error"]
        assert error["code"] == "engine_lost"


async def test_a_response_that_fails_before_anything_but_its_head_begins_with_response_created(
    rather_slow: MockClock,
) -> None:
    async with slow_rig() as (rig, client):
        served = rig.gateway.runner.served["tiny"]
        rig.gateway.runner.served = {"tiny": evolve(served, ask=Unprepared())}
        reply = await client.ask(responds("n=1"))
        assert (reply.status, reply.whole) == (200, True)
        assert trio.current_time() == pytest.approx(6, abs=0.1)
        assert types_of(parts(reply.body)) == ["response.created", "response.in_progress", "response.failed"]


@ASKS
async def test_the_5_s_begin_with_admission(ask: Any, rather_slow: MockClock) -> None:
    async with slow_rig(requests_max=1, admit_s=100) as (rig, client):
        first = await rig.client()
        await first.send(chats("n=1 s=30"))
        await trio.testing.wait_all_tasks_blocked()
        began = trio.current_time()
        await client.send(ask("n=1 s=20"))
        await client.until(b" 200 OK\r\n")
        admitted_s = 30 if ask in {echoes, responds} else 30 + HEAD_WITHIN_S
        assert trio.current_time() - began == pytest.approx(admitted_s, abs=0.1)


async def test_a_request_that_is_not_admitted_keeps_its_status(rather_slow: MockClock) -> None:
    async with slow_rig(requests_max=1, admit_s=20) as (rig, client):
        await (await rig.client()).send(chats("n=1 s=30"))
        await trio.testing.wait_all_tasks_blocked()
        reply = await client.ask(chats("n=1"))
        assert (reply.status, reply.error["code"]) == (503, "overloaded")


async def test_a_client_of_http_1_0_gets_comments_without_chunks(rather_slow: MockClock) -> None:
    async with slow_rig() as (_, client):
        await client.send(chats("n=1 s=40").replace(b"HTTP/1.1", b"HTTP/1.0"))
        await client.until(b"\r\n\r\n")
        body = b""
        while await client.more():
            pass
        body, client.buffer = client.buffer, b""
        assert body.startswith(COMMENT * 2 + b"data: ")
        assert body.endswith(b"data: [DONE]\n\n")


async def test_a_bug_in_one_stream_ends_its_comments_alone(
    rather_slow: MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway_rig(first_token_s=600) as rig:
        broken, whole = await rig.client(), await rig.client()
        await broken.send(chats("n=1 s=40"))
        await trio.testing.wait_all_tasks_blocked()
        begin_stream, begun = HttpResponse.begin_stream, list[HttpResponse]()

        def fail_first(response: HttpResponse) -> None:
            begun.append(response)
            assert len(begun) > 1
            begin_stream(response)

        monkeypatch.setattr(HttpResponse, "begin_stream", fail_first)
        await trio.sleep(1)
        await whole.send(chats("n=1 s=40"))
        assert (await whole.reply()).body.count(COMMENT) == 2
        assert COMMENT not in (await broken.reply()).body
        await leave_all(rig)
    assert caplog.messages.count("a bug ended the comments of a stream") == 1


@ASKS
async def test_a_client_may_leave_at_any_moment(ask: Any, rather_slow: MockClock) -> None:
    async with slow_rig() as (rig, _):
        for place, after_s in enumerate((0.1, 4.9, 5.0, 5.1, 20.0, 41.0)):
            client = await rig.client()
            await client.send(ask("n=3 s=40"))
            await trio.sleep(after_s)
            await client.stream.aclose()
            await rig.worker.wait_left(place + 1)


async def test_other_tasks_run_between_the_comments_of_many_streams_and_may_end_some(
    rather_slow: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, sent, turns = 4 * LOOKS_A_TURN, list[HttpResponse](), [0]
    async with (
        gateway_rig(first_token_s=600, requests_max=count, connections_max=count, key_connections_max=count) as rig,
        trio.open_nursery() as nursery,
    ):
        for _ in range(count):
            await (await rig.client()).send(chats("n=1 s=12"))
        await trio.testing.wait_all_tasks_blocked()
        streams = rig.gateway.streams
        left = [*streams._open][-1]  # noqa: SLF001  # the last that a look comes to

        begun = trio.Event()

        def begin_stream(response: HttpResponse) -> None:
            begun.set()
            sent.append(response)
            turns[-1] += 1

        async def take_turns() -> None:
            await begun.wait()
            streams.remove(left)
            while len(sent) < count - 1:
                turns.append(0)
                await trio.lowlevel.checkpoint()

        monkeypatch.setattr(HttpResponse, "begin_stream", begin_stream)
        nursery.start_soon(take_turns)
        await trio.sleep(HEAD_WITHIN_S + 0.5)
        assert len(sent) == count - 1
        assert left.response not in sent
        assert max(turns) <= 2 * LOOKS_A_TURN  # tasks that run at once do so in any order
        await leave_all(rig)
