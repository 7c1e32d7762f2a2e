"""`make demo-vision` answers stock clients with what their pictures show."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from bench.rig.node import ROOT, free_ports, wait_until
from tests.rig.launched import running_launcher
from tests.rig.pictures import QUESTION, Shown, answer, content, pictures

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

MODEL = "tiny-vision"
WITHIN_S = 300.0
ENGINES = 3


def by_chat(client: OpenAI, shown: Shown) -> str:
    messages: list[Any] = [{"role": "user", "content": content([shown])}]
    given = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=32)
    return given.choices[0].message.content or ""


def input_of(shown: Shown) -> list[Any]:
    image = {"type": "input_image", "image_url": shown.url, "detail": "auto"}
    return [{"role": "user", "content": [image, {"type": "input_text", "text": QUESTION}]}]


def by_responses(client: OpenAI, shown: Shown) -> str:
    given = client.responses.create(model=MODEL, input=input_of(shown), temperature=0, max_output_tokens=32)
    return given.output_text


def by_websocket(client: OpenAI, shown: Shown) -> str:
    with client.responses.connect() as connection:
        connection.response.create(model=MODEL, input=input_of(shown), temperature=0, max_output_tokens=32)
        for event in connection:
            if event.type == "response.completed":
                return event.response.output_text
            if event.type in {"error", "response.failed"}:
                return event.model_dump_json()
    return ""


CLIENTS: list[Callable[[OpenAI, Shown], str]] = [by_chat, by_responses, by_websocket]


@pytest.mark.filterwarnings("ignore:connect:DeprecationWarning")  # openai calls websockets the older way
def test_the_demonstration_says_what_pictures_show_and_leaves_nothing(folder: Path) -> None:
    text = (ROOT / "examples" / "vision.toml").read_text()
    text = text.replace(f'path = "{MODEL}"', f'path = "{ROOT / "examples" / MODEL}"')
    ports = dict(zip(("7401", "7402", "7403", "8000", "8998"), free_ports(5), strict=True))
    for was, port in ports.items():
        assert was in text
        text = text.replace(was, str(port))
    with running_launcher(folder, text, ports["8000"]) as launcher:
        ready = wait_until(lambda: launcher.metric("espalier_engine_up") == ENGINES, WITHIN_S, 0.1)
        assert ready is not None, launcher.output()[-3000:]
        with OpenAI(base_url=f"http://127.0.0.1:{launcher.port}/v1", api_key="none", max_retries=0) as client:
            for ask in CLIENTS:
                for shown in pictures(seed=7, count=3):
                    assert ask(client, shown) == answer([shown])
        launcher.observe()
        launcher.signal(signal.SIGTERM)
        assert launcher.wait_exit(WITHIN_S) is not None
        assert (launcher.process.returncode, launcher.leftovers()) == (0, [])
