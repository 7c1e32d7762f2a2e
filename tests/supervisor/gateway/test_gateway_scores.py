"""Completions whose echoed prompts have log probabilities: whole and streamed the same, and within the memory of answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from trio.testing import MockClock

from tests.rig.gateway import gateway_client, ids, text

SCORED: dict[str, Any] = {"echo": True, "logprobs": 2, "max_tokens": 3}


def joined(tables: list[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    return {name: [each for table in tables for each in table[name]] for name in sorted(tables[0])}


@pytest.mark.parametrize("prompt", ["n=3 oak", "n=3 " + "日本 🙂 oak " * 60], ids=["short", "long"])
async def test_a_stream_has_the_same_table_as_an_answer_in_one_piece(prompt: str, rather_slow: MockClock) -> None:
    async with gateway_client() as (_, client):
        whole = (await client.ask(text(prompt, **SCORED))).json["choices"][0]
        streamed = await client.ask(text(prompt, **SCORED, stream=True))
    *events, done = streamed.events
    assert done == "[DONE]"
    chunks = [json.loads(event)["choices"][0] for event in events]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"] == prompt + "The oak is"
    tables = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"] is not None]
    assert joined(tables) == joined([whole["logprobs"]])
    columns = whole["logprobs"]
    assert {len(column) for column in columns.values()} == {len(ids(prompt)) + 3}
    assert (columns["token_logprobs"][0], columns["top_logprobs"][0], columns["text_offset"][0]) == (None, None, 0)
    assert columns["text_offset"] == sorted(columns["text_offset"])
    assert columns["text_offset"][-3] == len(prompt)


async def test_of_no_answer_the_prompt_alone_is_there(rather_slow: MockClock) -> None:
    async with gateway_client() as (rig, client):
        scored = (await client.ask(text("n=9 oak", echo=True, logprobs=1, max_tokens=0))).json
        silent = (await client.ask(text("n=9 oak", max_tokens=0, n=2))).json
        chat = await client.ask(text("n=9 oak", max_tokens=-1))
    prompt = len(ids("n=9 oak"))
    (choice,) = scored["choices"]
    assert (choice["text"], choice["finish_reason"], len(choice["logprobs"]["tokens"])) == ("n=9 oak", "length", prompt)
    assert scored["usage"]["completion_tokens"] == 0
    assert [(each["text"], each["finish_reason"]) for each in silent["choices"]] == [("", "length")] * 2
    assert (silent["usage"]["prompt_tokens"], silent["usage"]["completion_tokens"]) == (prompt, 0)
    assert (chat.status, chat.error["param"]) == (400, "max_tokens")
    assert rig.worker.running == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_that_never_fit_are_refused_before_an_engine_is_asked(
    stream: bool, rather_slow: MockClock
) -> None:
    async with gateway_client(answers_bytes_max=50_000) as (rig, client):
        fits = await client.ask(text("n=1 " + "x" * 100, **SCORED, stream=stream))
        refused = await client.ask(text(["n=1 " + "x" * 100] * 5, **SCORED, stream=stream))
        assert (fits.status, refused.status, refused.error["param"]) == (200, 400, "echo")
        assert refused.error["message"].startswith(
            "an answer that echoes its prompts and 2 log probabilities a token may"
        )
        assert refused.error["message"].endswith("ask for fewer logprobs, or send fewer prompts at a time")
        assert len(rig.worker.asked) == 1
        assert rig.gateway.memory.answers.reserved_bytes == 0
