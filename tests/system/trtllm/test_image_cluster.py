"""A node with an encoder, a prefill and a decode of TensorRT-LLM's kind answers about pictures over HTTP.

The package of its engines is the recorded fake, whose answers follow from the embeddings that its model gets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from bench.rig.node import MODEL, node, wait_until
from tests.rig.pictures import content, pictures
from tests.rig.trtllm_engines import FAKE, image_model

pytestmark = pytest.mark.realtime

WITHIN_S = 120.0
FIRST = """
kind = "trtllm"
leg = "{leg}"
settings.load_format = "dummy"
{memory}
"""
FURTHER = """
[engine.{leg}]
model = "{model}"
"""
MEMORY = "kv_tokens_max = 16384"
LEGS = (("prefill", MEMORY), ("decode", MEMORY), ("encode", ""))


def engines() -> str:
    """Return the sections of an engine of each leg, the first one without its header and its model."""
    keys = [(leg, FIRST.format(leg=leg, memory=memory)) for leg, memory in LEGS]
    return keys[0][1] + "".join(FURTHER.format(leg=leg, model=MODEL) + each for leg, each in keys[1:])


def ask(client: OpenAI, parts: list[Any]) -> str:
    messages: list[Any] = [{"role": "user", "content": parts}]
    given = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=12)
    return given.choices[0].message.content or ""


def test_answers_depend_on_the_pictures(folder: Path) -> None:
    model = image_model(folder, "qwen2_5_vl")
    environment = {"PYTHONPATH": str(FAKE), "ESPALIER_FAKE_TRTLLM_FOLDER": str(folder)}
    with node(folder, engine=engines(), model=model, environment=environment) as running:
        ready = wait_until(lambda: running.metric("espalier_engine_up") == 3, WITHIN_S, 0.1)
        assert ready is not None, running.output()[-3000:]
        with OpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none", max_retries=0) as client:
            first, second, third = pictures(seed=7, count=3)
            asked = [[first], [second], [third], [first, second], [second, first], []]
            answers = [ask(client, content(shown)) for shown in asked]
            assert len({*answers}) == len(asked)
            assert [ask(client, content(shown)) for shown in asked] == answers
            with pytest.raises(BadRequestError, match="video"):
                ask(client, [{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}])
