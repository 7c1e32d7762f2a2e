"""What clients ask of the chat template, from the socket to the prompt that a worker gets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from attrs import evolve
from trio.testing import MockClock

from actors.text.chat_template import compile_template
from actors.text.conversations import ConversationTemplate
from tests.rig import templates
from tests.rig.gateway import TINY, Client, Rig, chat, gateway_client, post, response
from tests.rig.templates import OFF

BEGUN = [{"role": "user", "content": "Say it. n=2"}, {"role": "assistant", "content": "I th"}]


@asynccontextmanager
async def serving(source: str, **defaults: object) -> AsyncIterator[tuple[Rig, Client]]:
    template = ConversationTemplate.learned(compile_template(source, str), source, {}, defaults)
    async with gateway_client(model=evolve(TINY, template=template)) as (rig, client):
        yield rig, client


def prompt(rig: Rig) -> str:
    return TINY.decode(rig.worker.asked[-1].tokens)


async def test_thinking_is_turned_off_by_a_variable_an_effort_or_the_operator(autojump_clock: MockClock) -> None:
    async with serving(templates.ON_BY_DEFAULT) as (rig, client):
        for asked in (
            post(chat(chat_template_kwargs={"enable_thinking": False})),
            post(chat(reasoning_effort="none")),
            response(reasoning={"effort": "none"}),
            response(chat_template_kwargs={"enable_thinking": False}),
        ):
            assert (await client.ask(asked)).status == 200
            assert prompt(rig).endswith(OFF)
        for asked in (post(chat()), post(chat(reasoning_effort="low")), response(reasoning={"effort": "medium"})):
            assert (await client.ask(asked)).status == 200
            assert not prompt(rig).endswith(OFF)
    async with serving(templates.ON_BY_DEFAULT, enable_thinking=False) as (rig, client):
        await client.ask(post(chat()))
        assert prompt(rig).endswith(OFF)
        await client.ask(post(chat(chat_template_kwargs={"enable_thinking": True})))
        assert not prompt(rig).endswith(OFF)


async def test_what_the_template_cannot_do_is_refused_by_its_field(autojump_clock: MockClock) -> None:
    async with gateway_client() as (rig, client):
        for asked, param in (
            (post(chat(chat_template_kwargs={"enable_thinking": False})), "chat_template_kwargs.enable_thinking"),
            (post(chat(reasoning_effort="high")), "reasoning_effort"),
            (response(reasoning={"effort": "high"}), "reasoning.effort"),
            (post({"messages": BEGUN[:1], "reasoning_effort": "high"}, "/tokenize"), "reasoning_effort"),
        ):
            reply = await client.ask(asked)
            assert (reply.status, reply.error["param"]) == (400, param)
        assert rig.worker.prompts == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_the_answer_goes_on_with_the_assistants_message(path: str, autojump_clock: MockClock) -> None:
    async with gateway_client() as (rig, client):
        field = "messages" if path.endswith("completions") else "input"
        body = {"model": "tiny", field: BEGUN, "continue_final_message": True, "add_generation_prompt": False}
        reply = await client.ask(post(body, path))
        assert reply.status == 200
        assert prompt(rig) == "<|im_start|>user\nSay it. n=2<|im_end|>\n<|im_start|>assistant\nI th"
        tokenized = await client.ask(post({"messages": BEGUN, "continue_final_message": True}, "/tokenize"))
        assert tokenized.json["tokens"] == list(rig.worker.asked[0].tokens)
        # Without the keys the message is closed, and another one begins.
        await client.ask(post({"model": "tiny", field: BEGUN}, path))
        assert prompt(rig).endswith("I th<|im_end|>\n<|im_start|>assistant\n")


async def test_a_participants_name_and_the_keys_of_an_answer_are_taken(autojump_clock: MockClock) -> None:
    async with gateway_client() as (rig, client):
        named = {"role": "user", "name": "bob", "content": [{"type": "text", "text": "Hi", "cache_control": {}}]}
        answer = {"role": "assistant", "content": None, "refusal": "I will not."}
        reply = await client.ask(post({"model": "tiny", "messages": [named, answer, named], "max_tokens": 2}))
        assert reply.status == 200
        assert "assistant\nI will not.<|im_end|>" in prompt(rig)
