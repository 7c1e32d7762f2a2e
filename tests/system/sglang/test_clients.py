"""Stock clients, against a node with the real engine."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import openai
import pytest
import websockets.sync.client
from websockets.exceptions import InvalidStatus
from websockets.typing import Origin

from bench.rig.clients import Chat, Outcome, ResponsesSocket, chat_body, response_body
from bench.rig.node import MODEL, Node, wait_until
from bench.rig.prompts import OAK_PROMPT, STORY_PROMPT

pytestmark = pytest.mark.engine

# openai 3.x opens its socket in a way that websockets 17.1 calls deprecated.
OPENAI_CONNECTS = pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")

MESSAGES = [{"role": "user", "content": OAK_PROMPT}]
LONG, FREE_WITHIN_S = 3500, 10.0  # tokens of an answer that would take longer, were it not left


def ask(client: openai.OpenAI, **options: Any) -> Any:
    wanted: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0}
    return client.chat.completions.create(**wanted | options)


def text_of(stream: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def post(port: int, body: object, **headers: str) -> tuple[int, Any, dict[str, str]]:
    connection = HTTPConnection("127.0.0.1", port, timeout=120)
    data = body if isinstance(body, bytes) else json.dumps(body)
    connection.request("POST", "/v1/chat/completions", data, {"content-type": "application/json", **headers})
    answer = connection.getresponse()
    got = {name.lower(): value for name, value in answer.getheaders()}
    payload = json.loads(answer.read())
    connection.close()
    return answer.status, payload, got


# Answers ---------------------------------------------------------------------------------


@OPENAI_CONNECTS
def test_every_way_of_asking_gets_the_same_text(client: openai.OpenAI) -> None:
    whole = ask(client)
    expected = whole.choices[0].message.content
    assert expected.startswith("The oak")
    assert whole.choices[0].finish_reason == "stop"
    assert text_of(ask(client, stream=True)) == expected
    with client.responses.connect() as connection:
        for _ in range(2):
            connection.response.create(model=MODEL, input=OAK_PROMPT, temperature=0)
            deltas = ""
            for event in connection:
                if event.type == "response.output_text.delta":
                    deltas += event.delta
                if event.type == "response.completed":
                    assert event.response.output_text == deltas == expected
                    assert event.response.usage is not None
                    assert event.response.usage.output_tokens == whole.usage.completion_tokens
                    break


@OPENAI_CONNECTS
def test_a_socket_remembers_its_last_answer(client: openai.OpenAI) -> None:
    with client.responses.connect() as connection:
        previous = None
        for text in ("My name is Ada.", "What is my name?"):
            connection.response.create(
                model=MODEL, input=text, temperature=0, previous_response_id=previous or openai.omit
            )
            for event in connection:
                if event.type == "response.completed":
                    previous, usage = event.response.id, event.response.usage
                    break
        alone = ask(client, messages=[{"role": "user", "content": text}], max_tokens=1)
        assert usage is not None
        assert usage.input_tokens > alone.usage.prompt_tokens


def test_usage_counts_cached_tokens(client: openai.OpenAI, served: Node) -> None:
    prompt = "a prompt that nobody has asked before " * 8
    messages = [{"role": "user", "content": prompt}]
    first, second = (ask(client, messages=messages, max_tokens=4).usage for _ in range(2))
    assert first.prompt_tokens == second.prompt_tokens > 64
    assert second.prompt_tokens_details.cached_tokens >= second.prompt_tokens - 32
    assert second.prompt_tokens_details.cached_tokens % 16 == 0, "whole pages of the cache"
    streamed = Chat(served.port, chat_body(prompt, 4, stream_options={"include_usage": True})).read()
    assert streamed.usage is not None
    assert streamed.usage["completion_tokens"] == 4


@pytest.mark.parametrize("stop", [["acorns"], ["Its acorns feed", "zzz"], "."])
def test_stop_strings_end_the_answer_and_never_show(client: openai.OpenAI, stop: list[str] | str) -> None:
    expected = ask(client).choices[0].message.content
    at = min(expected.index(each) for each in ([stop] if isinstance(stop, str) else stop) if each in expected)
    answer = ask(client, stop=stop)
    assert answer.choices[0].message.content == expected[:at]
    assert answer.choices[0].finish_reason == "stop"
    assert text_of(ask(client, stop=stop, stream=True)) == expected[:at]
    assert answer.usage.completion_tokens < ask(client).usage.completion_tokens


def test_lengths_are_kept(client: openai.OpenAI) -> None:
    short = ask(client, max_tokens=3)
    assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("length", 3)
    long = ask(client, max_tokens=80, extra_body={"min_tokens": 70})
    assert long.usage.completion_tokens >= 70
    exact = ask(client, max_tokens=90, extra_body={"ignore_eos": True})
    assert (exact.choices[0].finish_reason, exact.usage.completion_tokens) == ("length", 90)


def test_characters_are_never_split(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Say hello in Japanese"}]
    stream = ask(client, messages=messages, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "こんにちは" in "".join(pieces)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_seeds_are_not_promised(client: openai.OpenAI) -> None:
    model = client.models.retrieve(MODEL)
    assert model.honours_seed is False  # type: ignore[attr-defined]
    texts = {ask_warm(client) for _ in range(6)}
    assert len(texts) > 1, "if a seed is honoured now, say so"


def ask_warm(client: openai.OpenAI) -> str:
    text: str = ask(client, temperature=2, seed=7, max_tokens=40).choices[0].message.content
    return text


# Refusals --------------------------------------------------------------------------------

WRONG: dict[str, list[Any]] = {
    "temperature": [-1, 3, "hot"],
    "top_p": [0, 1.5, "x"],
    "top_k": [0, -2, 1.5],
    "min_p": [-0.1, 2],
    "frequency_penalty": [3, "x"],
    "presence_penalty": [-3],
    "repetition_penalty": [0, -1, 3],
    "max_tokens": [0, -5, 1.5, "9", 2**40],
    "max_completion_tokens": [0, 100_000],
    "min_tokens": [-1, 2**40],
    "stop": ["", ["a"] * 17, [1], {"a": 1}],
    "stop_token_ids": [[-1], [512], [2**40], ["a"], 5],
    "seed": [2**64, "x", 1.5],
    "logit_bias": [{"5": "x"}, {"512": 1}],
    "logprobs": [5],
    "top_logprobs": [600],
    "n": [0, 129],
    "response_format": [{"type": "poem"}],
    "tools": [[{"type": "function", "function": {"name": "f"}}]],
    "stream": ["yes"],
    "stream_options": [{"include_usage": "yes"}],
    "messages": [[], "hello", [{"role": "nobody", "content": "x"}], [{"role": "user", "content": 5}]],
    "model": [5, ""],
    "rid": [5],
    "sampling_params": [{}],
    "input_ids": [[1, 9999]],
}


@pytest.mark.parametrize("field", WRONG)
def test_what_would_harm_the_engine_is_refused_by_name(served: Node, field: str) -> None:
    host = served.observe()["host"].pid
    for value in WRONG[field]:
        status, body, headers = post(served.port, chat_body(OAK_PROMPT) | {field: value})
        assert status == 400, (field, value, body)
        error = body["error"]
        assert error["type"] == "invalid_request_error"
        assert field in (error["param"] or "") or field in error["message"], (value, error)
        assert headers["x-should-retry"] == "false"
    assert served.observe()["host"].pid == host


@pytest.mark.parametrize("field", ["temperature", "top_k", "stop_token_ids", "seed", "logit_bias", "tools"])
def test_a_socket_lives_on_after_a_refusal(served: Node, field: str) -> None:
    socket = ResponsesSocket(served.port)
    for value in WRONG[field]:
        socket.send(response_body(OAK_PROMPT) | {field: value})
        refused = socket.read()
        assert refused.status == 400, (value, refused)
        assert refused.error is not None
        assert field in (refused.error["param"] or "") or field in refused.error["message"], refused
    socket.send(response_body(OAK_PROMPT))
    assert socket.read().whole
    socket.close()


def test_a_prompt_that_does_not_fit_names_its_field(served: Node) -> None:
    longest = json.loads(served.get("/v1/models")[1])["data"][0]["max_model_len"]
    status, body, _ = post(served.port, chat_body("ab " * 9000))
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert body["error"]["param"] == "messages"
    status, body, _ = post(served.port, chat_body(OAK_PROMPT) | {"max_tokens": longest})
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "context_length_exceeded", "max_tokens")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b'"x"', b"[" * 5000, b'{"top_p": 1e999}'])
def test_what_is_no_json_object_is_refused(served: Node, body: bytes) -> None:
    assert post(served.port, body)[0] == 400


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        ask(client, model="gpt")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")
    assert [model.id for model in client.models.list()] == [MODEL]


# The door --------------------------------------------------------------------------------


def test_foreign_pages_and_names_are_kept_out(served: Node) -> None:
    body = chat_body(OAK_PROMPT, 2, stream=False)
    assert post(served.port, body, Origin="https://evil.example")[0] == 403
    assert post(served.port, body, Host="evil.example")[0] == 403
    assert post(served.port, body, Origin=f"http://127.0.0.1:{served.port}")[0] == 200
    assert post(served.port, body, Origin=f"http://127.0.0.1:{served.port + 1}")[0] == 403  # another server's page
    with pytest.raises(InvalidStatus) as caught:
        websockets.sync.client.connect(
            f"ws://127.0.0.1:{served.port}/v1/responses", origin=Origin("https://evil.example"), proxy=None
        )
    assert caught.value.response.status_code == 403


def test_a_request_id_is_said_back(served: Node) -> None:
    body = chat_body(OAK_PROMPT, 2, stream=False)
    assert post(served.port, body, **{"x-request-id": "mine-1"})[2]["x-request-id"] == "mine-1"
    assert len(post(served.port, body)[2]["x-request-id"]) >= 16
    assert post(served.port, {}, **{"x-request-id": "mine-2"})[2]["x-request-id"] == "mine-2"


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
