"""What a text client can ask of the engine's sampling and grammars, each proved by what it does on the real engine."""

from __future__ import annotations

import json
import re
from http.client import HTTPConnection
from typing import Any

import pytest
from openai import OpenAI
from pydantic import BaseModel, ConfigDict

from bench.rig.node import MODEL, Node
from bench.rig.prompts import OAK_PROMPT
from tests.rig.gateway import TINY, ids

pytestmark = pytest.mark.engine

MESSAGES = [{"role": "user", "content": OAK_PROMPT}]


def chat(client: OpenAI, **options: Any) -> Any:
    wanted: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    return client.chat.completions.create(**wanted | options)


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


def test_a_penalty_makes_an_answer_repeat_itself_less(client: OpenAI) -> None:
    def repeats(**extra: int) -> int:
        answer = chat(client, max_tokens=100, extra_body={"ignore_eos": True, "return_token_ids": True, **extra})
        tokens = answer.choices[0].model_extra["token_ids"]
        return len(tokens) - len(set(tokens))

    usual = repeats()
    for option in ("frequency_penalty", "presence_penalty", "repetition_penalty"):
        assert repeats(**{option: 2}) < usual, option


def test_temperature_draws_and_top_k_one_does_not(client: OpenAI) -> None:
    drawn = {contents(chat(client, temperature=2, top_p=1))[0] for _ in range(6)}
    assert len(drawn) > 1
    assert len({contents(chat(client, temperature=2, extra_body={"top_k": 1}))[0] for _ in range(3)}) == 1
    assert len({contents(chat(client, temperature=2, top_p=0.001))[0] for _ in range(3)}) == 1
    assert len({contents(chat(client, temperature=2, extra_body={"min_p": 1}))[0] for _ in range(3)}) == 1


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


# Grammars --------------------------------------------------------------------------------


class Tree(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    name: str
    age: int
    old: bool


SCHEMA = Tree.model_json_schema() | {"additionalProperties": False}
SCHEMA["properties"]["name"]["maxLength"] = 12
SCHEMA["properties"]["age"] |= {"minimum": 0, "maximum": 999}
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "<tree>"}}


def test_an_answer_keeps_to_a_json_schema(client: OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "tree", "schema": SCHEMA, "strict": True}}
    for temperature in (0, 1.5):
        answer = chat(client, response_format=form, max_tokens=200, temperature=temperature)
        assert answer.choices[0].finish_reason == "stop"
        Tree.model_validate_json(answer.choices[0].message.content)


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"regex": "(oak|elm) [0-9]{3}"}, r"(oak|elm) [0-9]{3}"),
        ({"ebnf": 'root ::= "yes" | "no"'}, r"yes|no"),
        ({"structural_tag": json.dumps(TAG)}, r"<tree>"),
    ],
    ids=["regex", "ebnf", "structural_tag"],
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


# Refusals --------------------------------------------------------------------------------
# What the gateway, the processor and the checker of grammars refuse is in the tests of each; here the engine lives.

APIS: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": OAK_PROMPT},
    "/v1/responses": {"input": OAK_PROMPT},
}
REFUSED: list[tuple[dict[str, object], str]] = [
    ({"logit_bias": {"512": 1}}, "logit_bias"),
    ({"stop_token_ids": [512]}, "stop_token_ids"),
    ({"stop_token_ids": [2**63]}, "stop_token_ids"),
    ({"repetition_penalty": 1e-38}, "repetition_penalty"),
    ({"lora_path": "x"}, "lora_path"),
    ({"regex": "((("}, "regex"),
    ({"ebnf": "root ::= nothing"}, "ebnf"),
    ({"ebnf": "root ::= root"}, "ebnf"),
    ({"structural_tag": "{}"}, "structural_tag"),
]


def pids(served: Node) -> dict[str, int]:
    return {role: seen.pid for role, seen in served.observe().items() if role != "checker"}


@pytest.mark.parametrize("api", APIS)
def test_a_refusal_names_its_field_and_the_engine_lives(api: str, served: Node, client: OpenAI) -> None:
    before = pids(served)
    for extra, field in REFUSED:
        status, answer = post(served.port, api, {"model": MODEL, **APIS[api], **extra})
        assert (status, answer["error"]["param"].startswith(field)) == (400, True), (extra, answer)
    assert pids(served) == before
    assert chat(client, max_tokens=2).choices[0].message.content


def test_a_grammar_without_a_next_token_ends_its_own_answer_alone(served: Node, client: OpenAI) -> None:
    """If every token were forbidden, a scheduler that draws one, where it does not take the likeliest, would end."""
    before = pids(served)
    one, several = 'root ::= "a" rest\nrest ::= rest', 'root ::= "oak" rest | "fir" rest\nrest ::= rest "x"'
    end = {"logit_bias": {str(token): 100 for token in TINY.eos_token_ids}}  # likelier than any other, where all may be
    cases: list[dict[str, object]] = [
        {"ebnf": ebnf, "temperature": heat, **more} for ebnf in (one, several) for heat in (0, 1) for more in ({}, end)
    ]
    for case in (*cases, {"ebnf": one, "max_tokens": 2}):
        status, answer = post(served.port, "/v1/completions", {"model": MODEL, "prompt": OAK_PROMPT, **case})
        assert (status, answer["error"]["code"]) == (400, "engine_refused"), (case, answer)
    assert pids(served) == before
    assert chat(client, max_tokens=2).choices[0].message.content
