"""Reasoning and calls in the answers of every API: apart in chat completions, and the text as it is in completions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from attrs import evolve

from actors.text.formats.table import AnswerFormat
from tests.rig import gateway
from tests.rig.gateway import TINY, Worker, chat, gateway_rig, ids, leave_all, post, text
from tests.rig.tools import SHOWING

LINE = 'Oak. <tool_call>{"name": "f", "arguments": {"a": "b"}}</tool_call>'
THOUGHT = "<think>Old?</think>Yes."
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture(autouse=True)
def _format(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = AnswerFormat("hermes", "think")
    monkeypatch.setattr(gateway, "TINY", evolve(TINY, template=SHOWING, answers=answers))


def asking(line: str, **fields: Any) -> bytes:
    return post(chat(f"n={len(ids(line))}", **fields))


async def test_calls_and_reasoning_in_one_piece() -> None:
    async with gateway_rig(worker=Worker(line=LINE)) as rig:
        reply = await (await rig.client()).ask(asking(LINE, tools=TOOLS))
        [choice] = reply.json["choices"]
        assert choice["message"]["content"] == "Oak. "
        assert [call["function"] for call in choice["message"]["tool_calls"]] == [
            {"name": "f", "arguments": '{"a": "b"}'}
        ]
        assert choice["finish_reason"] == "tool_calls"
        await leave_all(rig)
    async with gateway_rig(worker=Worker(line=THOUGHT)) as rig:
        reply = await (await rig.client()).ask(asking(THOUGHT))
        message = reply.json["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Old?", "Yes.")
        assert reply.json["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
        await leave_all(rig)


async def test_calls_and_reasoning_in_a_stream() -> None:
    for line, tools in ((LINE, TOOLS), (THOUGHT, None)):
        async with gateway_rig(worker=Worker(line=line)) as rig:
            reply = await (await rig.client()).ask(asking(line, stream=True, tools=tools))
            chunks = [json.loads(part) for part in reply.body.decode().split("data: ")[1:-1]]
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
            content = "".join(delta.get("content") or "" for delta in deltas)
            assert content == ("Oak. " if tools else "Yes.")
            assert any("tool_calls" in delta for delta in deltas) is bool(tools)
            assert "".join(delta.get("reasoning_content", "") for delta in deltas) == ("" if tools else "Old?")
            await leave_all(rig)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_completion_is_the_text_as_the_model_wrote_it(stream: bool) -> None:
    async with gateway_rig(worker=Worker(line=THOUGHT)) as rig:
        reply = await (await rig.client()).ask(text(f"n={len(ids(THOUGHT))}", stream=stream, max_tokens=100))
        assert reply.status == 200
        if not stream:
            assert reply.json["choices"][0]["text"] == THOUGHT
        await leave_all(rig)
