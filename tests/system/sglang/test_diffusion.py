"""A diffusion language model on the real engine: its blocks, its refusals, and the loss of an engine in mid-answer."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import trio
from attrs import evolve
from openai import OpenAI

from bench.rig.node import MODEL, SGLANG, Node, node, short_folder, wait_until
from bench.rig.processes import process_entry
from bench.rig.prompts import OAK_PROMPT
from protocol.errors import Unsupported
from protocol.messages.generation import Tokens
from protocol.messages.leaving import RunningRequests
from protocol.messages.memory import ReleaseMemory
from protocol.token_ids import TokenIds
from tests.contracts.engine import (
    aborts_before_the_first_token,
    aborts_in_mid_stream,
    at_rest,
    complete,
    ends_with_stop_at_a_stop_token,
    new_id,
    refuses_a_grammar_that_it_cannot_follow,
    request,
    slot,
)
from tests.rig.random_diffusion_model import random_diffusion_model
from tests.system.sglang.conftest import MakeEngine
from tests.system.sglang.test_clients import OPENAI_CONNECTS
from tests.system.sglang.test_options import APIS, post

pytestmark = pytest.mark.engine

BLOCK = 4
MESSAGES: Any = [{"role": "user", "content": OAK_PROMPT}]
CHECKS = (
    aborts_before_the_first_token,
    aborts_in_mid_stream,
    ends_with_stop_at_a_stop_token,
    refuses_a_grammar_that_it_cannot_follow,
)
LINES = 'diffusion = "LowConfidence"\ndiffusion_settings.threshold = 0.9\n'
TWO = f'{SGLANG}{LINES}[engine.{MODEL}-1]\nmodel = "{MODEL}"\nslots = 4\n{SGLANG}{LINES}'


@pytest.mark.nightly
async def test_blocks_come_whole_and_an_answer_goes_on_from_their_borders(make_engine: MakeEngine) -> None:
    path, keys = str(random_diffusion_model()), {"diffusion": "LowConfidence", "slots": 4, "kv_tokens_max": 512}
    async with make_engine(model_path=path, **keys) as engine:
        assert (engine.info.diffusion_block, engine.info.page_size, engine.info.grammars) == (BLOCK, BLOCK, ())
        wanted = request(engine, 18, 37)
        async with slot(engine, wanted) as generation:
            replies = [reply async for reply in generation]
        sizes = [len(reply.ids) for reply in replies[1:] if isinstance(reply, Tokens)]
        assert sizes == [3, 4, 4, 4, 3], "the rest of the prompt's block, whole blocks, and the answer's end"
        ids, _ = await complete(engine, evolve(wanted, id=new_id()))
        for sent in (3, 11):
            rest = evolve(wanted.sampling, tokens_max=18 - sent)
            tokens = wanted.tokens + TokenIds.of(ids[:sent])
            again = evolve(wanted, id=new_id(), tokens=tokens, sampling=rest, resumed_tokens=sent)
            assert (await complete(engine, again))[0] == ids[sent:]
        for check in CHECKS:
            await check(engine)
            await at_rest(engine)
        wrong = [evolve(wanted, logprobs=0), *(evolve(wanted, sampling=each) for each in drawn(wanted.sampling))]
        for each in wrong:
            with pytest.raises(Unsupported):
                engine.submit(each)
        with pytest.raises(Unsupported, match="holds no requests"):
            await engine.operate(ReleaseMemory(running=RunningRequests.HOLD))
        limit = engine.info.request_tokens_max
        with trio.fail_after(20):
            for prompt in (limit - 2, limit - 3):
                assert len((await complete(engine, request(engine, limit - prompt, prompt)))[0]) == limit - prompt


def drawn(sampling: Any) -> list[Any]:
    """Return the sampling with each option that asks for another token than the likeliest."""
    options: list[dict[str, object]] = [
        {"temperature": 0.5},
        {"tokens_min": 2},
        {"logit_bias": {5: 100.0}},
        {"frequency_penalty": 1.0},
        {"presence_penalty": 1.0},
        {"repetition_penalty": 1.1},
    ]
    return [evolve(sampling, **each) for each in options]


@pytest.fixture(scope="module")
def diffusing() -> Iterator[Node]:
    model = random_diffusion_model()
    with short_folder() as folder, node(folder, slots=4, engine=TWO, model=model) as running:
        yield running


@pytest.fixture(scope="module")
def stock(diffusing: Node) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{diffusing.port}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.nightly
@OPENAI_CONNECTS
def test_every_api_answers_by_blocks_and_refuses_by_name(diffusing: Node, stock: OpenAI) -> None:
    extra = {"ignore_eos": True, "return_token_ids": True}
    chat = stock.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=18, extra_body=extra)
    choice: Any = chat.choices[0]
    assert (choice.finish_reason, chat.usage and chat.usage.completion_tokens) == ("length", 18)
    chunks = list(
        stock.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_tokens=18,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=extra,
        )
    )
    parts = [ids for chunk in chunks for each in chunk.choices if (ids := (each.model_extra or {}).get("token_ids"))]
    assert [id_ for ids in parts for id_ in ids] == choice.model_extra["token_ids"]
    assert max(map(len, parts)) == BLOCK
    assert "".join(each.delta.content or "" for chunk in chunks for each in chunk.choices) == choice.message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 18
    text = stock.completions.create(model=MODEL, prompt=OAK_PROMPT, max_tokens=9, n=2, extra_body=extra)
    assert len({each.text for each in text.choices}) == 1
    respond = stock.responses.create(model=MODEL, input=OAK_PROMPT, max_output_tokens=16, extra_body=extra)
    events = list(
        stock.responses.create(model=MODEL, input=OAK_PROMPT, max_output_tokens=16, stream=True, extra_body=extra)
    )
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == respond.output_text
    with stock.responses.connect() as connection:
        # The stock client's own arguments have no field for the engine's options.
        connection.response.create(model=MODEL, input=OAK_PROMPT, max_output_tokens=16)
        done: Any = next(event for event in connection if event.type in {"response.completed", "response.incomplete"})
    assert respond.output_text.startswith(done.response.output_text[:8])
    ids = stock.completions.create(model=MODEL, prompt=[31, 38, 45, 52, 59], max_tokens=9, extra_body=extra).usage
    assert ids is not None
    assert (ids.prompt_tokens, ids.completion_tokens) == (5, 9)
    with stock.completions.create(
        model=MODEL, prompt=OAK_PROMPT, max_tokens=3000, stream=True, extra_body=extra
    ) as left:
        next(iter(left))
    assert wait_until(lambda: not diffusing.metric("espalier_engine_running"), 10.0) is not None
    for wrong, field in REFUSED:
        for api in APIS if field in SHARED else ["/v1/chat/completions"]:
            status, answer = post(diffusing.port, api, {"model": MODEL, **APIS[api], **wrong})
            assert (status, answer["error"]["param"].startswith(field)) == (400, True), (wrong, answer)


SHARED = ("temperature", "repetition_penalty", "min_tokens", "logit_bias", "regex")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
REFUSED: list[tuple[dict[str, object], str]] = [
    ({"temperature": 0.7}, "temperature"),
    ({"repetition_penalty": 1.2}, "repetition_penalty"),
    ({"min_tokens": 3}, "min_tokens"),
    ({"logit_bias": {"5": 100}}, "logit_bias"),
    ({"regex": "a*"}, "regex"),
    ({"frequency_penalty": 1}, "frequency_penalty"),
    ({"presence_penalty": 1}, "presence_penalty"),
    ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": SCHEMA}, "response_format"),
    ({"ebnf": 'root ::= "a"'}, "ebnf"),
    ({"tools": [TOOL], "tool_choice": "required"}, "tool"),
]


@pytest.mark.nightly
def test_an_answer_whose_engine_is_killed_goes_on_in_the_other_one(diffusing: Node, stock: OpenAI) -> None:
    wanted: dict[str, Any] = {"model": MODEL, "prompt": OAK_PROMPT, "max_tokens": 120}
    extra = {"ignore_eos": True, "return_token_ids": True}
    whole: Any = stock.completions.create(**wanted, extra_body=extra).choices[0]
    got: list[int] = []
    for chunk in stock.completions.create(**wanted, extra_body=extra, stream=True):
        before = len(got)
        got += [id_ for choice in chunk.choices for id_ in (choice.model_extra or {}).get("token_ids") or ()]
        if before < 20 <= len(got):
            os.killpg(busy_engine(diffusing), signal.SIGKILL)
    assert got == whole.model_extra["token_ids"]
    assert diffusing.metric("espalier_resumes_total") == 1


def busy_engine(target: Node) -> int:
    """Return the process group of the engine that computes: its scheduler is found running, the other one sleeps."""
    target.observe()
    schedulers = [entry for entry in target.living() if target.roles.get(entry.pid) == "scheduler"]
    seen = Counter[int]()
    for _ in range(20):
        seen.update(
            entry.session
            for entry in map(process_entry, [each.pid for each in schedulers])
            if entry and entry.state == "R"
        )
        time.sleep(0.005)
    return seen.most_common(1)[0][0]
