"""Each text of a conversation, from the socket to the prompt that a worker gets, or the refusal of its field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from trio.testing import MockClock

from tests.rig import templates
from tests.rig.gateway import (
    CONTENTS_OF_TINY,
    TINY,
    Client,
    Rig,
    create,
    gateway_client,
    load_with_fixed_clock,
    post,
)

ALPHA, BETA = "Never reveal ALPHA.", "Answer in BETA."
RESPONSES, CHAT, TOKENIZE = "/v1/responses", "/v1/chat/completions", "/tokenize"


def said(role: str, content: object) -> dict[str, object]:
    return {"role": role, "content": content}


def prompt(rig: Rig) -> str:
    return TINY.decode(rig.worker.asked[-1].tokens)


async def ask(client: Client, path: str, turns: list[dict[str, object]], **fields: Any) -> Any:
    name = "input" if path == RESPONSES else "messages"
    return await client.ask(post({"model": "tiny", name: turns, **fields}, path))


@pytest.mark.parametrize("source", [templates.STRICT, templates.OVERWRITING, templates.LEADING])
async def test_instructions_and_developers_both_reach_the_model(source: str, autojump_clock: MockClock) -> None:
    async with gateway_client(model=load_with_fixed_clock(CONTENTS_OF_TINY, source)) as (rig, client):
        turns = [said("developer", BETA), said("user", "Hi n=2")]
        assert (await ask(client, RESPONSES, turns, instructions=ALPHA)).status == 200
        assert f"{ALPHA}\n\n{BETA}" in prompt(rig)
        turns = [said("system", ALPHA), *turns]
        assert (await ask(client, CHAT, turns)).status == 200
        assert f"{ALPHA}\n\n{BETA}" in prompt(rig)
        tokens = (await ask(client, TOKENIZE, turns)).json["tokens"]
        assert tokens == list(rig.worker.asked[-1].tokens)


async def test_a_message_that_the_template_refuses_or_leaves_out_is_named(autojump_clock: MockClock) -> None:
    turns = [said("user", "Hi"), said("assistant", "Yes?"), said("system", BETA), said("user", "Go")]
    for source, reason in (
        (templates.STRICT, "refuses this conversation: System message must be at the beginning."),
        (templates.LEADING, "leaves the text of"),
    ):
        async with gateway_client(model=load_with_fixed_clock(CONTENTS_OF_TINY, source)) as (rig, client):
            for path, param in ((CHAT, "messages[2]"), (TOKENIZE, "messages[2]"), (RESPONSES, "input[2]")):
                reply = await ask(client, path, turns, **({"instructions": ALPHA} if path == RESPONSES else {}))
                assert (reply.status, reply.error["param"]) == (400, param)
                assert reason in reply.error["message"]
            assert rig.worker.prompts == []


async def test_what_a_template_refuses_as_a_whole_is_the_whole_field(autojump_clock: MockClock) -> None:
    async with gateway_client(model=load_with_fixed_clock(CONTENTS_OF_TINY, templates.SEARCHING)) as (_, client):
        turns = [said("system", ALPHA), said("assistant", "Yes?")]
        for path, param in ((CHAT, "messages"), (TOKENIZE, "messages"), (RESPONSES, "input")):
            reply = await ask(client, path, turns)
            assert (reply.status, reply.error["param"]) == (400, param)


async def test_instructions_that_have_no_place_are_named_and_so_is_what_is_continued(autojump_clock: MockClock) -> None:
    async with gateway_client(model=load_with_fixed_clock(CONTENTS_OF_TINY, templates.ALTERNATING)) as (_, client):
        reply = await ask(client, RESPONSES, [said("user", "Hi")], instructions=ALPHA)
        assert (reply.status, reply.error["param"]) == (400, "instructions")
        await client.upgrade()
        await client.say(create("n=2"))
        first = (await client.events())[-1]["response"]["id"]
        await client.say(create([said("assistant", "No.")], previous_response_id=first))
        assert (await client.event())["error"]["param"] == "input[0]"


async def test_parts_of_a_text_reach_the_model_apart(autojump_clock: MockClock) -> None:
    parts = [{"type": "text", "text": text} for text in ("The limit is 50.", "What is the limit? n=2")]
    for source, text in (
        (templates.CHATML, "The limit is 50. What is the limit? n=2"),
        (templates.LISTS, "The limit is 50.\nWhat is the limit? n=2"),
    ):
        async with gateway_client(model=load_with_fixed_clock(CONTENTS_OF_TINY, source)) as (rig, client):
            assert (await ask(client, CHAT, [said("user", parts)])).status == 200
            assert prompt(rig).endswith(f"<user>{text}")


async def test_a_template_in_a_processors_file_is_served(autojump_clock: MockClock) -> None:
    files = {name: data for name, data in CONTENTS_OF_TINY.items() if name != "chat_template.jinja"}
    files["chat_template.json"] = json.dumps({"chat_template": templates.ONLY_LISTS}).encode()
    async with gateway_client(model=load_with_fixed_clock(files)) as (rig, client):
        assert (await ask(client, CHAT, [said("user", "Hi n=2")])).status == 200
        assert prompt(rig) == "<user>Hi n=2 "
