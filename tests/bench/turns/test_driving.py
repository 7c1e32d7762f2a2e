"""Turns against a server: what is sent, what is measured of the answers, and what a failure is."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import trio
from attrs import evolve
from tokenizers import Tokenizer
from wsproto.events import TextMessage

from bench.load.messages import Api, Target
from bench.load.process import Failed
from bench.turns import driving
from bench.turns.driving import Drive, Load, Sample, Turn, kept_tokens
from tests.bench.cost.samples import spent
from tests.bench.turns.samples import turn
from tests.rig.scripted_server import (
    Json,
    Script,
    Scripted,
    SocketEvent,
    SocketScript,
    response_end,
    saying,
    scripted,
    whole,
)

METRICS = """\
# TYPE espalier_prompt_cache_tokens_total counter
espalier_prompt_cache_tokens_total{model="tiny",result="reused"} %d
espalier_prompt_cache_tokens_total{model="tiny",result="encoded"} %d
espalier_prompt_cache_bytes{model="tiny"} 1
"""


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driving, "SETTLE_S", 0.0)
    monkeypatch.setattr(driving, "IDLE_S", 0.001)


async def drive(
    script: Script | SocketScript, api: Api, tokenizer: Tokenizer, metrics: Callable[[], str] = str
) -> tuple[Scripted, Sample, list[Turn]]:
    """Run two clients' sessions of three turns in a thread, since they run in a loop of their own."""
    shown = list[Turn]()
    async with scripted(script) as server:
        target = Target(url=server.url, api=api, model="tiny", timeout_s=5)
        load = Load(api=api, tokens=400, messages=4, new_tokens=40, turns=2, clients=2)
        driven = Drive(load, target, [], tokenizer, "1", shown.append, metrics)
        return server, await trio.to_thread.run_sync(driven.run, 7), shown


async def test_a_chat_sends_the_whole_conversation_each_turn(tokenizer: Tokenizer) -> None:
    server, sample, shown = await drive(whole, "chat", tokenizer)
    lengths = [len(body["messages"]) for body in server.bodies]
    assert lengths == [4, 6, 4, 4, 6, 6, 8, 8], "a warm-up of two turns, then three turns of two clients"
    assert (sample.turns, [each.number for each in shown], sample.round) == (shown, [1, 2, 3], 7)
    for each in shown:
        assert each.prompt_tokens == [7, 7]
        assert len(each.first_token_ms) == 2
        assert min(each.first_token_ms) > 0


async def test_clients_have_different_texts_and_the_same_from_turn_to_turn(tokenizer: Tokenizer) -> None:
    server, _, _ = await drive(whole, "chat", tokenizer)
    *_, one, other, longer, _ = [body["messages"] for body in server.bodies]
    assert one[0] != other[0]
    assert longer[: len(one)] in (one, other)


async def test_a_websocket_continues_its_last_response(tokenizer: Tokenizer) -> None:
    numbers = iter(range(100))

    def answer(body: Json) -> list[SocketEvent]:
        delta = '{"type": "response.output_text.delta", "delta": "w"}'
        return [TextMessage(delta), TextMessage(json.dumps(response_end("completed", 1, id=f"resp_{next(numbers)}")))]

    server, sample, _ = await drive(answer, "responses-ws", tokenizer)
    first, second, third = (server.bodies[place : place + 2] for place in (2, 4, 6))
    assert all("previous_response_id" not in body for body in first)
    assert [len(body["input"]) for body in (*second, *third)] == [2] * 4
    assert {body["previous_response_id"] for body in second} == {"resp_2", "resp_3"}
    assert {body["previous_response_id"] for body in third} == {"resp_4", "resp_5"}
    assert server.connections == 3, "one of the warm-up and one of each client"
    assert sample.turns[0].cached_tokens == [3, 3]


async def test_a_refused_turn_fails_the_load(tokenizer: Tokenizer) -> None:
    refusal = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\n{}"
    with pytest.RaisesGroup(pytest.RaisesExc(Failed, match="400"), flatten_subgroups=True):
        await drive(saying(refusal), "chat", tokenizer)


async def test_the_share_not_encoded_anew_is_of_the_turn_alone(tokenizer: Tokenizer) -> None:
    counts = iter([(0, 100), (0, 200), (0, 200), (90, 210), (90, 210), (90, 210)])
    _, sample, _ = await drive(whole, "chat", tokenizer, lambda: METRICS % next(counts))
    assert [each.kept_share for each in sample.turns] == [0.0, 0.9, None]


def test_metrics_of_dynamo_are_read_too() -> None:
    lines = "dynamo_frontend_tokenizer_cache_cached_tokens_total 30\ndynamo_frontend_tokenizer_cache_uncached_tokens_total 4"
    assert kept_tokens(lines) == (30, 4)
    assert kept_tokens("") == (0, 0)


def test_the_cost_of_a_turn_is_shared_among_its_clients_and_the_engine_is_apart() -> None:
    groups = {"node front": spent(0.03, 0.01), "launcher": spent(0.002), "node worker-1": spent(0.01)}
    several = evolve(turn(1), groups=groups, first_token_ms=[1.0, 2.0])
    assert (several.gateway_ms, several.workers_ms) == pytest.approx((21, 5))
