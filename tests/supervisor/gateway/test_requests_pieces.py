"""Reasoning and calls, which no API renders yet, fail their request by name: nothing of an answer is lost silently."""

from __future__ import annotations

import pytest

from tests.rig.gateway import Worker, chat, gateway_rig, ids, leave_all, post, text
from tests.rig.marked_format import Marked

LINES = {"Reasoning": "Oak. [think]Old?[/think] Yes.", "CallPart": "Oak. [call f]{}[/call] Yes."}


@pytest.fixture(autouse=True)
def _format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.text.choices.make_stage", lambda *_: Marked())


@pytest.mark.parametrize("kind", LINES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["chat", "completions"])
async def test_an_answer_with_a_part_that_an_api_cannot_send_fails(kind: str, stream: bool, api: str) -> None:
    prompt = f"n={len(ids(LINES[kind]))}"
    bodies = {
        "chat": post(chat(prompt, stream=stream)),
        "completions": text(prompt, stream=stream, max_tokens=100),
    }
    async with gateway_rig(worker=Worker(line=LINES[kind])) as rig:
        reply = await (await rig.client()).ask(bodies[api])
        assert reply.status == (200 if stream else 500)
        assert f"a part that no API here can send: {kind}".encode() in reply.body
        assert b"Yes" not in reply.body
        await leave_all(rig)
