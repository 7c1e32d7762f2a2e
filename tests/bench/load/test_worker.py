"""Conversations: each turn knows those before it."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import Any

import pytest
import trio
from wsproto.events import TextMessage

from bench.load.messages import Go, Job, Message, Target
from bench.load.plan import Pace, Span, Workload
from bench.load.worker import Worker
from tests.bench.load.test_command import records, worked
from tests.rig.scripted_server import Scripted, response_end, saying, scripted, whole


def conversations(server: Scripted, api: Any, **pace: Any) -> Job:
    target = Target(url=server.url, api=api, model="m", timeout_s=20.0)
    workload = Workload(prompt_tokens=Span(5, 5), output_tokens=Span(2, 2), turns=Span(3, 3))
    return Job(target=target, workload=workload, pace=Pace(**pace))


async def test_a_turn_of_a_chat_sends_all_turns_before_it() -> None:
    async with scripted(whole) as server:
        messages = await worked(conversations(server, "chat", clients=1, requests=2))
    turns = [[(m["role"], m["content"]) for m in body["messages"]] for body in server.bodies]
    assert [len(each) for each in turns] == [1, 3, 5, 1, 3, 5]
    assert turns[2][:3] == turns[1]
    assert [role for role, _ in turns[2]] == ["user", "assistant", "user", "assistant", "user"]
    assert {content for role, content in turns[2] if role == "assistant"} == {"ww"}
    assert [(each.number, each.turn) for each in records(messages)] == [(n, turn) for n in (0, 1) for turn in range(3)]


@pytest.mark.parametrize("pace", [{"clients": 2, "requests": 4}, {"rate": 500.0, "requests": 4}])
async def test_a_turn_over_a_websocket_names_the_response_before_it_on_the_same_socket(pace: dict[str, Any]) -> None:
    made = 0

    def answer(body: dict[str, Any]) -> list[Any]:
        nonlocal made
        made += 1
        events = [{"type": "response.output_text.delta", "delta": "w"}, response_end("completed", 2)]
        events[1]["response"]["id"] = f"resp_{made}"
        return [TextMessage(data=json.dumps(each)) for each in events]

    async with scripted(answer) as server:
        messages = await worked(conversations(server, "responses-ws", **pace))
    named = [body.get("previous_response_id") for body in server.bodies]
    assert len(named) == 12
    assert named.count(None) == 4
    assert len({*named} - {None}) == 8
    assert all(each.ending == "completed" for each in records(messages))
    assert messages[-1].connections == server.connections <= 4


@pytest.mark.realtime
async def test_the_end_of_a_run_loses_no_record_of_a_report_that_is_being_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.load.worker.REPORT_EVERY_S", 0.001)
    messages: list[Message] = []

    async def send(message: Message) -> None:
        await trio.sleep(0.01)
        messages.append(message)

    async with scripted(whole) as server:
        worker = Worker(conversations(server, "chat", clients=2, requests=6), send)
        worker.go(Go(time.perf_counter()))
        with trio.fail_after(90):
            await worker.run()
    assert len(records(messages)) == 18


async def test_a_turn_that_fails_ends_its_conversation() -> None:
    async with scripted(saying(b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n")) as server:
        messages = await worked(conversations(server, "chat", clients=1, requests=2))
    assert [(each.number, each.turn, each.ending) for each in records(messages)] == [(0, 0, "failed"), (1, 0, "failed")]


@pytest.mark.realtime
async def test_conversations_of_an_open_loop_pause_between_turns_and_only_begin_at_their_times() -> None:
    async with scripted(whole) as server:
        job = conversations(server, "chat", rate=200.0, requests=3, think_s=0.1, concurrency_max=1)
        found = records(await worked(job))
    assert [each.planned_s is None for each in found] == [False, True, True] * 3
    begun = [[each.sent_s for each in found if each.number == number] for number in range(3)]
    assert all(later - earlier >= 0.1 for each in begun for earlier, later in pairwise(each))
