"""The versions of a real engine's weights in every answer: before an update, after it, and over it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Any, TypeAlias

import pytest
from openai import OpenAI

from bench.rig.node import MODEL, Node
from tests.system.sglang.test_memory import WITHIN_S, post
from tests.system.sglang.test_weights import FOLDER, other_checkpoint

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning"),
]

TOKENS = 300
BEFORE = 8  # events that are read before an update begins, those of the beginning of a response among them
Amid: TypeAlias = Callable[[], object]
Versions: TypeAlias = list[tuple[str, int]]
PROMPT = "The oak and the river"
MESSAGES: Any = [{"role": "user", "content": PROMPT}]
ANSWER: Any = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture
def first_weights(served: Node) -> Iterator[None]:
    """Give the node's engine its first weights again, which other tests expect."""
    yield
    if post(served, "/weights_version")[1][f"main/{MODEL}-0"]["version"] != "default":
        status, outcomes = post(served, "/update_weights_from_disk", folder=str(FOLDER), version="default")
        assert status == 200, outcomes


def amid(pieces: Iterable[Any], during: Amid) -> list[Any]:
    """Return all pieces of a stream, and call `during` behind the first few."""
    read = list[Any]()
    for piece in pieces:
        read.append(piece)
        if len(read) == BEFORE:
            during()
    return read


def versions(shown: dict[str, Any], tokens: int) -> Versions:
    """Return the versions that an answer of so many tokens shows; none if it shows nothing."""
    found = {name: value for name, value in shown.items() if name.startswith("weight_")}
    if "weight_versions" not in found:
        return [(version, tokens) for version in found.values()]
    split = [(each["version"], each["tokens"]) for each in found["weight_versions"]]
    assert found["weight_version"] == split[-1][0]
    assert sum(count for _, count in split) == tokens, "each token has its version"
    return split


def by_chat(client: OpenAI, during: Amid) -> list[Versions]:
    """Ask for two choices in one stream, each of which has its own versions."""
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=2, stream=True, max_tokens=TOKENS, **ANSWER
    )
    ends = [each.choices[0] for each in amid(stream, during) if each.choices and each.choices[0].finish_reason]
    assert sorted(end.index for end in ends) == [0, 1]
    return [versions(end.model_extra, TOKENS) for end in ends]


def by_completions(client: OpenAI, during: Amid) -> list[Versions]:
    stream = client.completions.create(model=MODEL, prompt=PROMPT, stream=True, max_tokens=TOKENS, **ANSWER)
    return [versions(amid(stream, during)[-1].choices[0].model_extra, TOKENS)]


def by_responses(client: OpenAI, during: Amid) -> list[Versions]:
    with client.responses.stream(model=MODEL, input=PROMPT, max_output_tokens=TOKENS, **ANSWER) as stream:
        return [versions(amid(stream, during)[-1].response.model_extra, TOKENS)]


def by_socket(client: OpenAI, during: Amid) -> list[Versions]:
    with client.responses.connect() as connection:
        asked: Any = {"type": "response.create", "model": MODEL, "input": PROMPT, "max_output_tokens": TOKENS}
        connection.send(asked | {"temperature": 0, "ignore_eos": True})
        last = amid(_until_end(connection), during)[-1]
        return [versions(last.response.model_extra, TOKENS)]


def _until_end(connection: Iterable[Any]) -> Iterator[Any]:
    for event in connection:
        yield event
        if event.type in {"response.completed", "response.incomplete"}:
            return


def whole(client: OpenAI) -> list[dict[str, Any]]:
    """Return what an answer of each dialect in one piece shows of versions."""
    chat = client.chat.completions.create(model=MODEL, messages=MESSAGES, n=2, max_tokens=4, **ANSWER)
    completion = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4, **ANSWER)
    response = client.responses.create(model=MODEL, input=PROMPT, max_output_tokens=4, **ANSWER)
    extras = [*(each.model_extra for each in (*chat.choices, *completion.choices)), response.model_extra]
    return [{key: value for key, value in (each or {}).items() if key.startswith("weight")} for each in extras]


WAYS = (by_chat, by_completions, by_responses, by_socket)


@pytest.mark.usefixtures("first_weights")
def test_answers_have_the_versions_of_their_weights(served: Node, client: OpenAI, tmp_path: Path) -> None:
    assert whole(client) == [{}] * 4
    ask: dict[str, object] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    assert "weight" not in json.dumps(post(served, "/v1/completions", **ask)[1])
    began, done = Barrier(len(WAYS) + 1), Barrier(len(WAYS) + 1)

    def during() -> None:
        began.wait(WITHIN_S)
        done.wait(WITHIN_S)

    def ask_by(way: Callable[[OpenAI, Amid], list[Versions]]) -> list[Versions]:
        try:
            return way(client, during)
        except BaseException:
            began.abort()  # the others wait for this one
            raise

    other = other_checkpoint(tmp_path / "other")
    with ThreadPoolExecutor(len(WAYS)) as threads:
        running = [threads.submit(ask_by, way) for way in WAYS]
        with suppress(BrokenBarrierError):
            began.wait(WITHIN_S)
            fields = {"folder": str(other), "version": "step-1", "running": "hold"}
            assert post(served, "/update_weights_from_disk", **fields)[0] == 200
            done.wait(WITHIN_S)
        held = [each.result(WITHIN_S) for each in running]
    for answers in held:
        for split in answers:
            assert [version for version, _ in split] == ["default", "step-1"], held
    assert whole(client) == [{"weight_version": "step-1"}] * 4
    assert by_chat(client, lambda: None) == [[("step-1", TOKENS)]] * 2


@pytest.mark.usefixtures("first_weights")
def test_an_answer_that_a_stop_string_ends_has_them_as_well(served: Node, client: OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": TOKENS, **ANSWER}
    asked["extra_body"] = {"ignore_eos": True, "min_tokens": TOKENS * 2 // 3}  # no stop string ends it before

    def rename() -> None:
        assert post(served, "/weights_version", version="renamed")[0] == 200

    with client.completions.create(stop="a", stream=True, stream_options={"include_usage": True}, **asked) as stream:
        *pieces, end, usage = amid(stream, rename)
    assert end.choices[0].finish_reason == "stop"
    split = versions(end.choices[0].model_extra, usage.usage.completion_tokens)
    assert [version for version, _ in split] == ["default", "renamed"]
    answer = client.completions.create(stop="a", **asked)
    assert answer.choices[0].text == "".join(piece.choices[0].text for piece in pieces)
    assert versions(answer.choices[0].model_extra, TOKENS) == [("renamed", TOKENS)]
