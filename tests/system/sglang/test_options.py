"""What a text client can ask, each thing proved by what it does on the real engine."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from http.client import HTTPConnection
from typing import Any

import pytest
from openai import OpenAI
from pydantic import BaseModel, ConfigDict

from bench.rig.clients import ResponsesSocket, response_body
from bench.rig.node import MODEL, Node
from bench.rig.prompts import OAK_PROMPT
from tests.rig.gateway import TINY, ids

pytestmark = pytest.mark.engine

MESSAGES = [{"role": "user", "content": OAK_PROMPT}]


def chat(client: OpenAI, **options: Any) -> Any:
    wanted: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    return client.chat.completions.create(**wanted | options)


def complete(client: OpenAI, prompt: str | Sequence[Any] = "The oak", **options: Any) -> Any:
    return client.completions.create(
        **({"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 8} | options)
    )


def contents(answer: Any) -> list[str]:
    return [choice.message.content for choice in answer.choices]


def post(port: int, path: str, body: object) -> tuple[int, Any]:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    payload = json.loads(answer.read())
    connection.close()
    return answer.status, payload


# Which token comes next ------------------------------------------------------------------


def test_a_bias_forces_its_token_and_forbids_another(client: OpenAI) -> None:
    token = ids(" willow")[0]
    forced = chat(client, logit_bias={str(token): 100}, max_tokens=3)
    assert forced.choices[0].message.content == TINY.tokenizer.decode([token] * 3)
    usual = chat(client).choices[0].message.content
    first = ids(usual)[0]
    assert not chat(client, logit_bias={str(first): -100}).choices[0].message.content.startswith(usual[:4])


@pytest.mark.parametrize("option", [{"frequency_penalty": 2}, {"presence_penalty": 2}, {"repetition_penalty": 2}])
def test_a_penalty_makes_an_answer_repeat_itself_less(client: OpenAI, option: dict[str, int]) -> None:
    def repeats(**extra: int) -> int:
        answer = chat(client, max_tokens=200, extra_body={"ignore_eos": True, "return_token_ids": True, **extra})
        tokens = answer.choices[0].model_extra["token_ids"]
        return len(tokens) - len(set(tokens))

    assert repeats(**option) < repeats()


def test_temperature_draws_and_top_k_one_does_not(client: OpenAI) -> None:
    drawn = {contents(chat(client, temperature=2, top_p=1))[0] for _ in range(6)}
    assert len(drawn) > 1
    assert len({contents(chat(client, temperature=2, extra_body={"top_k": 1}))[0] for _ in range(3)}) == 1
    assert len({contents(chat(client, temperature=2, top_p=0.001))[0] for _ in range(3)}) == 1
    assert len({contents(chat(client, temperature=2, extra_body={"min_p": 1}))[0] for _ in range(3)}) == 1


# Where an answer ends --------------------------------------------------------------------


def test_min_tokens_lengthens_an_answer(client: OpenAI) -> None:
    usual = chat(client, max_tokens=300)
    assert usual.choices[0].finish_reason == "stop"
    least = usual.usage.completion_tokens + 20
    longer = chat(client, max_tokens=300, extra_body={"min_tokens": least})
    assert longer.usage.completion_tokens >= least


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_left_out_or_included(client: OpenAI, stream: bool) -> None:
    whole = chat(client, max_tokens=300).choices[0].message.content
    stop = whole.split()[3]
    for included in (False, True):
        answer = chat(client, stop=stop, stream=stream, extra_body={"include_stop_str_in_output": included})
        text = "".join(c.choices[0].delta.content or "" for c in answer) if stream else contents(answer)[0]
        assert text == whole[: whole.index(stop) + len(stop) * included]


# Log probabilities -----------------------------------------------------------------------


def test_log_probabilities_are_exact_for_each_delta_of_a_stream(client: OpenAI) -> None:
    whole = chat(client, logprobs=True, top_logprobs=3)
    expected = [(token.token, token.logprob) for token in whole.choices[0].logprobs.content]
    got, text, token_bytes = [], b"", b""
    for chunk in chat(client, logprobs=True, top_logprobs=3, stream=True):
        choice = chunk.choices[0]
        text += (choice.delta.content or "").encode()
        for token in (choice.logprobs and choice.logprobs.content) or ():
            got.append((token.token, token.logprob))
            token_bytes += bytes(token.bytes)
            assert token.top_logprobs[0].token == token.token
            assert len(token.top_logprobs) == 3
            assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
        assert text.startswith(token_bytes)
    assert token_bytes == text == whole.choices[0].message.content.encode()
    assert [token for token, _ in got] == [token for token, _ in expected]
    assert all(abs(a - b) < 0.02 for (_, a), (_, b) in zip(got, expected, strict=True))


def test_completions_have_log_probabilities_in_their_own_shape(client: OpenAI) -> None:
    choice = complete(client, logprobs=2).choices[0]
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:place])) for place in range(len(logprobs.tokens))]
    assert all(len(top) == 2 for top in logprobs.top_logprobs)
    assert all(logprob <= 0 for logprob in logprobs.token_logprobs)


def test_responses_have_log_probabilities_in_their_deltas(served: Node) -> None:
    socket = ResponsesSocket(served.port)
    socket.send(response_body(OAK_PROMPT, 8, top_logprobs=2, include=["message.output_text.logprobs"]))
    token_bytes = text = b""
    while (event := json.loads(socket.connection.recv(30)))["type"] not in {
        "response.completed",
        "response.incomplete",
    }:
        assert event["type"] != "error", event
        if event["type"] == "response.output_text.delta":
            text += event["delta"].encode()
            token_bytes += b"".join(bytes(token["bytes"]) for token in event["logprobs"])
            assert all(len(token["top_logprobs"]) == 2 for token in event["logprobs"])
    socket.close()
    assert token_bytes == text != b""


# Several choices, several prompts --------------------------------------------------------


def test_n_gives_as_many_choices_streamed_or_not(client: OpenAI) -> None:
    whole = chat(client, n=3)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len(set(contents(whole))) == 1
    assert whole.usage.completion_tokens == 3 * chat(client).usage.completion_tokens
    assert len(set(contents(chat(client, n=4, temperature=2)))) > 1
    pieces: dict[int, str] = {}
    ends: dict[int, str] = {}
    for chunk in chat(client, n=3, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] = pieces.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert [pieces[index] for index in range(3)] == contents(whole)
    assert ends == {0: "length", 1: "length", 2: "length"}


def test_the_best_of_many_is_no_less_likely_than_the_others(client: OpenAI) -> None:
    best = complete(client, n=1, best_of=6, temperature=1.5, logprobs=1)
    assert len(best.choices) == 1
    assert best.usage.completion_tokens > len(best.choices[0].logprobs.tokens)
    mean = sum(best.choices[0].logprobs.token_logprobs) / len(best.choices[0].logprobs.token_logprobs)
    assert mean <= 0


def test_prompts_may_be_several_and_may_be_token_ids(client: OpenAI) -> None:
    one = complete(client, "The oak").choices[0].text
    two = complete(client, "The willow").choices[0].text
    many = complete(client, ["The oak", "The willow"])
    assert [(choice.index, choice.text) for choice in many.choices] == [(0, one), (1, two)]
    tokens = [ids("The oak"), ids("The willow")]
    assert [choice.text for choice in complete(client, tokens).choices] == [one, two]
    out = complete(client, tokens[0], extra_body={"return_token_ids": True}).choices[0]
    assert TINY.tokenizer.decode(out.model_extra["token_ids"]) == out.text == one


def test_an_echo_comes_before_the_answer(client: OpenAI) -> None:
    plain = complete(client, "The oak").choices[0].text
    assert complete(client, "The oak", echo=True).choices[0].text == "The oak" + plain
    assert complete(client, ids("The oak"), echo=True).choices[0].text == "The oak" + plain
    streamed = "".join(chunk.choices[0].text for chunk in complete(client, "The oak", echo=True, stream=True))
    assert streamed == "The oak" + plain


# Grammars --------------------------------------------------------------------------------


class Tree(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    name: str
    age: int
    old: bool


SCHEMA = Tree.model_json_schema() | {"additionalProperties": False}
SCHEMA["properties"]["name"]["maxLength"] = 12
SCHEMA["properties"]["age"] |= {"minimum": 0, "maximum": 999}


def test_an_answer_keeps_to_a_json_schema(client: OpenAI, served: Node) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "tree", "schema": SCHEMA, "strict": True}}
    for temperature in (0, 1.5):
        answer = chat(client, response_format=form, max_tokens=200, temperature=temperature)
        assert answer.choices[0].finish_reason == "stop"
        Tree.model_validate_json(answer.choices[0].message.content)
    socket = ResponsesSocket(served.port)
    text = {"format": {"type": "json_schema", "name": "tree", "schema": SCHEMA, "strict": True}}
    socket.send(
        {"type": "response.create", "model": MODEL, "input": OAK_PROMPT, "text": text, "max_output_tokens": 200}
    )
    outcome = socket.read()
    socket.close()
    assert outcome.error is None
    Tree.model_validate_json(outcome.text)


def test_an_answer_is_a_json_object(client: OpenAI) -> None:
    answer = chat(client, response_format={"type": "json_object"}, max_tokens=400, extra_body={"logit_bias": {}})
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)
    assert answer.choices[0].message.content.startswith("{")


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"regex": "(oak|elm) [0-9]{3}"}, r"(oak|elm) [0-9]{3}"),
        ({"ebnf": 'root ::= "yes" | "no"'}, r"yes|no"),
        (
            {
                "structural_tag": json.dumps(
                    {
                        "type": "structural_tag",
                        "format": {"type": "const_string", "value": "<tree>"},
                    }
                )
            },
            r"<tree>",
        ),
    ],
)
def test_an_answer_keeps_to_a_grammar(client: OpenAI, extra: dict[str, str], pattern: str) -> None:
    answer = chat(client, extra_body=extra, max_tokens=60, temperature=1)
    assert re.fullmatch(pattern, answer.choices[0].message.content)
    assert answer.choices[0].finish_reason == "stop"


def test_no_token_follows_the_end_of_a_grammar(client: OpenAI) -> None:
    for temperature in (0, 1, 1, 1):
        extra = {"regex": "a", "ignore_eos": True, "return_token_ids": True}
        choice = chat(client, extra_body=extra, temperature=temperature).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("a", "stop")
        assert len(choice.model_extra["token_ids"]) == 2  # the other one is the end


# Caches, memory, length ------------------------------------------------------------------


def test_a_salt_keeps_the_prefix_cache_apart(client: OpenAI) -> None:
    long = [{"role": "user", "content": "Tell me about the salt " * 20}]

    def cached(salt: str) -> Any:
        usage = chat(client, messages=long, max_tokens=1, extra_body={"cache_salt": salt}).usage
        return usage.prompt_tokens_details.cached_tokens

    assert cached("a") == 0
    assert cached("a") > 100
    assert cached("b") == 0


def test_warming_up_fills_the_cache_and_can_be_continued(served: Node) -> None:
    socket = ResponsesSocket(served.port)
    long = "Tell me about the warm oak " * 20
    socket.send(response_body(long, generate=False))
    warmed = socket.read()
    assert warmed.usage is not None
    assert (warmed.text, warmed.error, warmed.usage["output_tokens"]) == ("", None, 0)
    socket.send(response_body(long, 4))
    usage = socket.read().usage
    assert usage is not None
    assert usage["input_tokens_details"]["cached_tokens"] > 100
    socket.close()


def test_a_conversation_is_truncated_only_when_that_is_asked(served: Node) -> None:
    turns = [{"role": ("user", "assistant")[place % 2], "content": f"{place} " + "word " * 60} for place in range(101)]
    socket = ResponsesSocket(served.port)
    body = {"type": "response.create", "model": MODEL, "input": turns, "max_output_tokens": 4, "temperature": 0}
    socket.send(body)
    error = socket.read().error
    assert error is not None
    assert error["code"] == "context_length_exceeded"
    socket.send(body | {"truncation": "auto"})
    outcome = socket.read()
    assert outcome.error is None
    assert outcome.usage is not None
    assert outcome.usage["input_tokens"] < 4096
    socket.close()


def test_text_becomes_tokens_and_tokens_text(served: Node) -> None:
    status, got = post(served.port, "/tokenize", {"model": MODEL, "prompt": "The oak is old, wörld 🙂"})
    assert (status, got["tokens"]) == (200, ids("The oak is old, wörld 🙂"))
    status, back = post(served.port, "/detokenize", {"model": MODEL, "tokens": got["tokens"]})
    assert (status, back["text"]) == (200, "The oak is old, wörld 🙂")
