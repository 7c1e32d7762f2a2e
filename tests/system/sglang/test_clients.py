"""Stock clients, against a node with the real engine."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import OpenAI, omit

from bench.rig.clients import Chat, Outcome, ResponsesSocket, chat_body, response_body
from bench.rig.node import MODEL, Node, wait_until
from bench.rig.prompts import OAK_PROMPT, STORY_PROMPT

pytestmark = pytest.mark.engine

# openai 3.x opens its socket in a way that websockets 17.1 calls deprecated.
OPENAI_CONNECTS = pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")

MESSAGES = [{"role": "user", "content": OAK_PROMPT}]
LONG, FREE_WITHIN_S = 3500, 30.0  # tokens of an answer that would take longer, were it not left
Pair = tuple[str, int]  # a text, and the number of its tokens


def ask(client: OpenAI, **options: Any) -> Any:
    wanted: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0}
    return client.chat.completions.create(**wanted | options)


# Answers ---------------------------------------------------------------------------------


def by_chat(client: OpenAI) -> tuple[Pair, str]:
    whole = ask(client)
    assert whole.choices[0].finish_reason == "stop"
    pieces = [chunk.choices[0].delta.content or "" for chunk in ask(client, stream=True) if chunk.choices]
    return (whole.choices[0].message.content, whole.usage.completion_tokens), "".join(pieces)


def by_completions(client: OpenAI) -> tuple[Pair, str]:
    wanted: dict[str, Any] = {"model": MODEL, "prompt": "The oak", "temperature": 0, "max_tokens": 24}
    whole = client.completions.create(**wanted)
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**wanted, stream=True))
    return (whole.choices[0].text, whole.usage.completion_tokens), streamed


def by_responses(client: OpenAI) -> tuple[Pair, str]:
    whole = client.responses.create(model=MODEL, input=OAK_PROMPT, temperature=0)
    assert whole.usage is not None
    with client.responses.stream(model=MODEL, input=OAK_PROMPT, temperature=0) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
    return (whole.output_text, whole.usage.output_tokens), "".join(pieces)


def by_socket(client: OpenAI) -> tuple[Pair, str]:
    """Ask over a WebSocket, and continue the conversation there."""
    with client.responses.connect() as connection:
        previous: str | None = None
        asked: list[tuple[str, Any, str]] = []
        for text in (OAK_PROMPT, "Which tree was it?"):
            pieces = ""
            connection.response.create(model=MODEL, input=text, temperature=0, previous_response_id=previous or omit)
            for event in connection:
                if event.type == "response.output_text.delta":
                    pieces += event.delta
                if event.type == "response.completed":
                    previous = event.response.id
                    asked.append((event.response.output_text, event.response.usage, pieces))
                    break
    (text, usage, streamed), (_, continued, _) = asked
    assert continued.input_tokens > usage.input_tokens + usage.output_tokens, "the conversation is continued"
    return (text, usage.output_tokens), streamed


@OPENAI_CONNECTS
@pytest.mark.parametrize("by", [by_chat, by_completions, by_responses, by_socket])
def test_each_api_answers_in_one_piece_and_in_a_stream(
    client: OpenAI, by: Callable[[OpenAI], tuple[Pair, str]]
) -> None:
    (text, tokens), streamed = by(client)
    assert text == streamed
    if by is by_completions:  # its prompt has no template
        assert tokens == 24
    else:
        assert (text, tokens) == by_chat(client)[0]
        assert text.startswith("The oak")


def test_usage_counts_cached_tokens(client: OpenAI, served: Node) -> None:
    prompt = "a prompt that has not been sent before " * 8
    messages = [{"role": "user", "content": prompt}]
    first, second = (ask(client, messages=messages, max_tokens=4).usage for _ in range(2))
    assert first.prompt_tokens == second.prompt_tokens > 64
    assert second.prompt_tokens_details.cached_tokens >= second.prompt_tokens - 32
    assert second.prompt_tokens_details.cached_tokens % 16 == 0, "whole pages of the cache"
    streamed = Chat(served.port, chat_body(prompt, 4, stream_options={"include_usage": True})).read()
    assert streamed.usage is not None
    assert streamed.usage["completion_tokens"] == 4


def test_lengths_are_kept(client: OpenAI) -> None:
    short = ask(client, max_tokens=3)
    assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("length", 3)
    least = ask(client).usage.completion_tokens + 20
    assert ask(client, max_tokens=300, extra_body={"min_tokens": least}).usage.completion_tokens >= least
    exact = ask(client, max_tokens=90, extra_body={"ignore_eos": True})
    assert (exact.choices[0].finish_reason, exact.usage.completion_tokens) == ("length", 90)


# Aborts ----------------------------------------------------------------------------------


def test_a_client_that_leaves_frees_the_engine(served: Node) -> None:
    """The fact; `make abort-times` has the times."""
    for pieces in (0, 10):
        chat = Chat(served.port, chat_body(STORY_PROMPT, LONG))
        if pieces:
            for _ in chat.events():
                if chat.outcome.pieces >= pieces:
                    break
        chat.leave()
        socket = ResponsesSocket(served.port)
        socket.send(response_body(STORY_PROMPT, LONG))
        socket.leave()
        idle(served)
        chat.close()
        socket.close()


def test_a_response_can_be_cancelled(served: Node) -> None:
    socket = ResponsesSocket(served.port)
    socket.send(response_body(STORY_PROMPT, 1000))
    outcome = Outcome()
    for _ in socket.events(outcome):
        if outcome.pieces == 3:
            socket.send({"type": "response.cancel"})
    assert (outcome.finish, outcome.whole) == ("cancelled", False)
    assert outcome.usage is not None
    assert 3 <= outcome.usage["output_tokens"] < 1000
    idle(served)
    socket.send(response_body(OAK_PROMPT))
    assert socket.read().whole
    socket.close()


def idle(served: Node, within_s: float = FREE_WITHIN_S) -> None:
    names = [f"espalier_engine_{name}" for name in ("running", "waiting", "kv_tokens_used")]
    names.append("espalier_requests_running")
    assert wait_until(lambda: not any(served.metric(name) for name in names), within_s) is not None


def test_sixty_four_clients_at_once_get_what_each_gets_alone(served: Node) -> None:
    trees = ("oak", "elm", "fox", "sea", "owl", "willow", "moon", "river")
    prompts = [f"Tell me about the {tree} {number}" for tree in trees for number in range(8)]
    alone = [Chat(served.port, chat_body(prompt, 24)).read().text for prompt in prompts]

    def at_once(prompt: str) -> str:
        socket = ResponsesSocket(served.port)
        socket.send(response_body(prompt, 24))
        outcome = socket.read()
        socket.close()
        return outcome.text

    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(at_once, prompts)) == alone
