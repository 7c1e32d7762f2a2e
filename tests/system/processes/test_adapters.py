"""Adapters through each door: chat, completions, Responses over HTTP and WebSocket, the models, and the operators' words."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from openai import NotFoundError, OpenAI
from websockets.sync.client import connect

from bench.rig.node import ROOT, SIMULATED, Node, node, short_folder

pytestmark = pytest.mark.realtime

TWO = """
[engine.tiny-0.adapters]
load.first = "adapters/first"
[engine.tiny-1]
model = "tiny"
kind = "simulated"
context_max = 8192
kv_tokens_max = 8_000_000
[engine.tiny-1.adapters]
loaded_max = 1
"""


@pytest.fixture(scope="module")
def served() -> Iterator[Node]:
    with short_folder() as folder, node(folder, engine=SIMULATED + TWO) as running:
        yield running


@pytest.fixture
def client(served: Node) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", max_retries=0) as stock:
        yield stock


def post(served: Node, path: str, **body: Any) -> tuple[int, Any]:
    connection = HTTPConnection("127.0.0.1", served.port, timeout=30)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    payload = json.loads(answer.read())
    connection.close()
    return answer.status, payload


def answers(served: Node, client: OpenAI, model: str) -> list[str]:
    """Return the answers of a model to the same words through each door."""
    said: Any = [{"role": "user", "content": "The oak"}]
    short: dict[str, Any] = {"model": model, "messages": said, "max_tokens": 8, "temperature": 0}
    chat: Any = client.chat.completions.create(**short)
    chunks: Any = client.chat.completions.create(**short, stream=True)
    response: Any = client.responses.create(model=model, input="The oak", max_output_tokens=16, temperature=0)
    with connect(f"ws://127.0.0.1:{served.port}/v1/responses") as socket:
        create = {"type": "response.create", "model": model, "input": "The oak", "max_output_tokens": 16}
        socket.send(json.dumps(create | {"temperature": 0}))
        events = list[Any]()
        while not events or events[-1]["type"] not in {"response.completed", "response.incomplete", "error"}:
            events.append(json.loads(socket.recv(timeout=30)))
    text = client.completions.create(model=model, prompt="The oak", max_tokens=8, temperature=0)
    assert {chat.model, text.model, response.model, events[-1]["response"]["model"]} == {model}
    over_socket = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert over_socket == response.output_text
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == (
        chat.choices[0].message.content
    )
    return [chat.choices[0].message.content, text.choices[0].text, response.output_text]


def test_an_adapter_is_a_model_at_every_door(served: Node, client: OpenAI) -> None:
    listed = {model.id: model.model_extra["parent"] for model in client.models.list() if model.model_extra}
    assert listed == {"tiny": None, "tiny:first": "tiny"}
    assert client.models.retrieve("tiny:first").id == "tiny:first"
    usual, changed = answers(served, client, "tiny"), answers(served, client, "tiny:first")
    assert usual != changed
    assert changed == answers(served, client, "tiny:first")
    assert usual == answers(served, client, "tiny")


def test_an_adapter_that_is_not_loaded_is_no_model_and_the_loaded_ones_are_named(client: OpenAI) -> None:
    for ask in (
        lambda: client.chat.completions.create(model="tiny:none", messages=[{"role": "user", "content": "a"}]),
        lambda: client.completions.create(model="tiny:none", prompt="a"),
        lambda: client.responses.create(model="tiny:none", input="a"),
        lambda: client.models.retrieve("tiny:none"),
    ):
        with pytest.raises(NotFoundError, match="there is first") as caught:
            ask()
        assert caught.value.code == "model_not_found"


def test_an_adapter_comes_and_goes_by_http_and_is_refused_afterwards(served: Node, client: OpenAI) -> None:
    assert post(served, "/load_lora_adapter?engine=tiny-1", lora_name="late", lora_path="/adapters/late")[0] == 200
    assert "tiny:late" in {model.id for model in client.models.list()}
    assert answers(served, client, "tiny:late"), "only one of the two engines has it"
    status, body = post(served, "/load_lora_adapter?engine=tiny-1", lora_name="more", lora_path="/adapters/more")
    assert (status, "loaded_max is 1" in body["error"]["message"]) == (400, True)
    status, body = post(served, "/unload_lora_adapter", lora_name="late")
    assert status == 400
    assert body["error"]["message"].startswith("engine main/tiny-0 was not freed of the adapter: adapter 'late' is not")
    with pytest.raises(NotFoundError):
        client.completions.create(model="tiny:late", prompt="a")


@pytest.mark.nightly
def test_an_operator_loads_lists_and_unloads_by_the_command_line(served: Node, client: OpenAI) -> None:
    def engine(*words: str) -> tuple[int, str]:
        ended = subprocess.run(
            [sys.executable, "-m", "supervisor", str(served.folder / f"{served.port}.toml"), "engine", *words],
            cwd=ROOT,
            env={"TMPDIR": str(served.tmp), "PATH": "/usr/bin:/bin", "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return ended.returncode, ended.stdout + ended.stderr

    assert engine("tiny-0", "load-adapter", "--lora-name", "word", "--lora-path", "/adapters/word")[0] == 0
    code, printed = engine("tiny-0", "list-adapters")
    assert (code, '"name": "word"' in printed) == (0, True)
    assert answers(served, client, "tiny:word")
    code, printed = engine("tiny-0", "load-adapter", "--lora-name", "word", "--lora-path", "/adapters/word")
    assert (code, "loaded already" in printed) == (1, True)
    assert engine("tiny-0", "unload-adapter", "--lora-name", "word", "--wait-s", "5")[0] == 0
    code, printed = engine("all", "load-adapter", "--lora-name", "x", "--lora-path", "/x", "--model", "other")
    assert (code, "no engine of a model 'other'" in printed) == (1, True)


def test_the_file_with_a_wrong_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(
        f"""
[model.tiny]
path = "{ROOT / "examples" / "tiny"}"
[engine.tiny-0]
model = "tiny"
device = "cpu"
kv_tokens_max = 4096
settings.enable_lora = true
settings.max_lora_rank = 8
[engine.tiny-0.adapters]
max_rank = 8
load.gone = "gone"
"""
    )
    ended = subprocess.run(
        [sys.executable, "-m", "supervisor", "--check", str(tmp_path / "a.toml")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    for words in (
        "engine.tiny-0.settings.enable_lora: is given by [engine.NAME.adapters]",
        "engine.tiny-0.settings.max_lora_rank: is given by [engine.NAME.adapters]",
    ):
        assert words in ended.stdout + ended.stderr
