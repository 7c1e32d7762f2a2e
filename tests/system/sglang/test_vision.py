"""Pictures and videos through SGLang: one engine, one behind an encoder, and a pair behind one agree on each token."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import signal
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes.util import find_library
from http.client import HTTPConnection
from random import Random
from typing import Any

import pytest
import trio
from attrs import frozen
from PIL import Image

from bench.rig.node import Node, short_folder, wait_until
from protocol.tensors import Dtype
from tests.contracts import encoder as encoders
from tests.contracts.submission import submitted
from tests.rig.launched import at_free_ports, running_launcher, wait_ready
from tests.rig.media_samples import safetensors
from tests.rig.pictured_items import png, seeing_model
from tests.rig.pictures import video
from tests.rig.random_vision_models import random_vision_model
from tests.system.sglang.conftest import EACH_FAMILY, STARTED_WITHIN_S, MakeEncoder

pytestmark = pytest.mark.engine

WITHIN_S = 120.0
TOKENS = 16
PICTURES, VIDEOS = 12, 4  # prompts with them
SIZES = ((112, 84), (56, 56), (200, 140), (300, 50), (90, 260))
SAFETENSORS_NAMES = {Dtype.FLOAT32: "F32", Dtype.FLOAT16: "F16", Dtype.BFLOAT16: "BF16"}
NO_MOONCAKE = find_library("ibverbs") is None

WHOLE = """
[engine.whole]
model = "vision"
device = "cpu"
slots = 8
kv_tokens_max = 16384
"""
ENCODER = """
[engine.eyes]
model = "vision"
device = "cpu"
leg = "encode"
slots = 8
"""
PAIR = """
[engine.prefill]
model = "vision"
device = "cpu"
leg = "prefill"
bootstrap_port = 8998
slots = 8
kv_tokens_max = 16384
[engine.decode]
model = "vision"
device = "cpu"
leg = "decode"
slots = 8
kv_tokens_max = 16384
"""


@frozen
class Answer:
    text: str
    prompt_tokens: int
    cached_tokens: int


@contextmanager
def cluster(family: str, engines: str) -> Iterator[Node]:
    folder, names = random_vision_model(family), sorted(set(re.findall(r'model = "(\w+)"', engines)))
    models = "".join(f'[model.{name}]\npath = "{folder}"\n' for name in names)
    text = f"[gateway]\nport = 8000\n{models}{engines}"
    text, ports = at_free_ports(text, 8000, *([8998] if "8998" in text else []))
    with short_folder() as folder, running_launcher(folder, text, ports[0]) as target:
        wait_ready(target, STARTED_WITHIN_S)
        yield target


def picture(seed: int, width: int, height: int) -> dict[str, Any]:
    """Return the part of a message that shows a picture of random blocks."""
    chance, buffer = Random(seed), io.BytesIO()
    small = Image.frombytes("RGB", (8, 8), chance.randbytes(192))
    small.resize((width, height), Image.Resampling.BICUBIC).save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def prompts() -> list[list[dict[str, Any]]]:
    """Return prompts of one to three pictures, and some with a video, of which half have a picture, too."""
    asked = []
    for seed in range(PICTURES):
        parts = [text_part(f"Number {seed}: ")]
        for place in range(1 + seed % 3):
            parts += [picture(10 * seed + place, *SIZES[(seed + place) % len(SIZES)]), text_part(" and ")]
        asked.append(parts)
    for seed in range(VIDEOS):
        shown = video(Random(seed))
        parts = [text_part("Look: "), {"type": "video_url", "video_url": {"url": shown.url}}]
        asked.append([*parts, picture(500 + seed, 112, 84), text_part("!")] if seed % 2 else [*parts, text_part("?")])
    return asked


def ask(port: int, parts: list[dict[str, Any]], model: str = "vision") -> Answer:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    connection = HTTPConnection("127.0.0.1", port, timeout=WITHIN_S)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        document = json.loads(answer.read())
        assert answer.status == 200, document
        usage = document["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Answer(document["choices"][0]["message"]["content"], usage["prompt_tokens"], cached)
    finally:
        connection.close()


def different(ones: list[Answer], others: list[Answer]) -> list[int]:
    """Return the numbers of the prompts whose answers or prompts differ."""
    pairs = enumerate(zip(ones, others, strict=True))
    return [
        place for place, (one, other) in pairs if (one.text, one.prompt_tokens) != (other.text, other.prompt_tokens)
    ]


ENCODED = (ENCODER + WHOLE).replace("[engine.whole]", "[engine.behind]").replace('"vision"', '"encoded"')
PAIRED = (ENCODER + PAIR).replace("[engine.eyes]", "[engine.eyes-of-pair]").replace('"vision"', '"paired"')


@pytest.mark.nightly
@EACH_FAMILY
def test_an_engine_alone_and_one_behind_an_encoder_give_equal_tokens(family: str) -> None:
    with cluster(family, WHOLE + ENCODED) as target:
        whole, encoded = ([ask(target.port, each, model) for each in prompts()] for model in ("vision", "encoded"))
        assert different(whole, encoded) == []
        assert len({answer.text for answer in whole}) > len(whole) // 2, "the answers depend on the pictures"


@pytest.mark.nightly
@pytest.mark.skipif(NO_MOONCAKE, reason="Mooncake's library needs Debian's libibverbs1")
@EACH_FAMILY
def test_an_engine_alone_and_a_pair_behind_an_encoder_give_equal_tokens(family: str) -> None:
    with cluster(family, WHOLE + PAIRED) as target:
        whole, paired = ([ask(target.port, each, model) for each in prompts()] for model in ("vision", "paired"))
        assert different(whole, paired) == []


@pytest.mark.nightly
async def test_the_embeddings_of_a_picture_in_a_file_are_answered_as_the_picture(make_encoder: MakeEncoder) -> None:
    model = seeing_model(random_vision_model("qwen2_vl"))
    data = png(7, 200, 140)
    async with make_encoder(model_path=str(model.folder)) as encoder:
        item = model.image(data)
        async with submitted(encoder, encoders.batch(item)) as batch:
            (outcome,) = await encoders.result(batch)
    rows = outcome.data
    tensors = {
        "embeddings": (SAFETENSORS_NAMES[rows.dtype], rows.shape, bytes(rows.data)),
        "grid_thw": ("I64", (3,), struct.pack("<3q", *item.grid)),
    }
    file = base64.b64encode(safetensors(tensors)).decode()
    before = text_part("What is here? ")
    shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}}

    def asked() -> tuple[Answer, Answer]:
        with cluster("qwen2_vl", ENCODER + WHOLE) as target:
            return ask(target.port, [before, shown]), ask(
                target.port, [before, {"type": "image_embeds", "image_embeds": file}]
            )

    of_image, of_file = await trio.to_thread.run_sync(asked)
    assert (of_file.text, of_file.prompt_tokens) == (of_image.text, of_image.prompt_tokens)


def test_only_the_same_picture_shares_a_prefix_and_a_killed_encoder_comes_back() -> None:
    with cluster("qwen2_vl", ENCODER + WHOLE) as target:
        before, one, other = text_part("The same words before it " * 4), picture(1, 300, 200), picture(2, 300, 200)
        first, again, another = (ask(target.port, [before, each]) for each in (one, one, other))
        assert first.text == again.text
        assert again.cached_tokens >= first.prompt_tokens - 32  # all but the last pages
        words = ask(target.port, [before]).prompt_tokens
        assert 0 < another.cached_tokens <= words
        killed = [entry.pid for entry in target.living() if "espalier::encoder" in entry.command]
        assert len(killed) == 1, target.living()
        os.kill(killed[0], signal.SIGKILL)
        assert ask(target.port, [before, picture(3, 300, 200)]).text
        assert ask(target.port, [before, one]).text == first.text


@pytest.mark.nightly
def test_a_picture_in_an_engine_with_the_tower_shares_a_prefix_with_itself_alone() -> None:
    with cluster("qwen2_5_vl", WHOLE) as target:
        before, one, other = text_part("The same words before it " * 4), picture(1, 300, 200), picture(2, 300, 200)
        first, again, another = (ask(target.port, [before, each]) for each in (one, one, other))
        assert first.text == again.text
        assert again.cached_tokens > another.cached_tokens > 0
        assert wait_until(lambda: ask(target.port, [text_part("Hello")]).text, WITHIN_S)
