"""SGLang's embedders: the contract, equality with transformers for each family, and what ends while they compute."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from random import Random
from shutil import copytree
from typing import Any

import pytest
import trio
from attrs import evolve

from actors.engines.embedding.port import Embedder
from actors.engines.sglang.embedder import SglangEmbedder
from actors.engines.sglang.spec import SglangSpec
from protocol.errors import EngineDied, EngineLost, StartFailed, Unsupported
from protocol.messages.cluster import Leg
from protocol.messages.embedding import Pooling, TextItem
from protocol.messages.generation import Generate, Sampling
from protocol.messages.operations import FlushCache
from protocol.token_ids import TokenIds
from supervisor.engines.sglang.engine import run_embedder
from supervisor.supervision.registration import Registration
from tests.contracts.embedder import check_embedder, embed, plain_item, properties, rows
from tests.contracts.submission import at_rest, new_id, submitted
from tests.rig.random_text_models import ENCODER_TOKENS, EXPECTED, random_text_models, write_modules
from tests.system.sglang.conftest import STARTED_WITHIN_S, MakeEmbedder, ZygoteProcess, forked_hosts
from tests.system.sglang.test_lives import SCHEDULER, below

pytestmark = pytest.mark.engine

TOLERANCE = 1e-4
CHUNK = 64  # less than the longest texts of the models that may be computed in pieces
ENDED_WITHIN_S = 10.0
SPEC = SglangSpec("vectors", "", "cpu", slots=4, kv_tokens_max=16384, leg=Leg.EMBED, task="embed")
FAMILIES: Mapping[str, dict[str, Any]] = {
    "qwen3": {"task": "embed", "prefill_chunk": CHUNK},
    "bert-mean": {"task": "embed", "prefill_chunk": CHUNK},
    "bert-cross": {"task": "score"},
    "qwen3-score": {"task": "score", "prefill_chunk": CHUNK},
}

CONTRACT = ("qwen3", "bert-cross")  # of each output one: the rest differs in what is computed


def expected(model: Path) -> list[tuple[TextItem, list[float]]]:
    """Return items with what transformers computes for each."""
    found: list[tuple[list[int], int, list[float]]] = json.loads((model / EXPECTED).read_text())
    return [(TextItem(TokenIds.of(ids), second_at), row) for ids, second_at, row in found]


def difference(one: list[list[float]], other: list[list[float]]) -> float:
    assert [len(row) for row in one] == [len(row) for row in other]
    return max(abs(left - right) for rows in zip(one, other, strict=True) for left, right in zip(*rows, strict=True))


async def computed(engine: Embedder, *items: TextItem) -> list[list[float]]:
    async with submitted(engine, embed(*items)) as answer:
        return await rows(answer)


async def equals_transformers(engine: Embedder, model: Path) -> None:
    """Check that each text is what transformers computes: together, alone, in pieces, and from the cache."""
    items, known = zip(*expected(model), strict=True)
    assert difference(await computed(engine, *items), list(known)) < TOLERANCE
    for item, row in zip(items, known, strict=True):
        assert difference(await computed(engine, item), [row]) < TOLERANCE


async def takes_the_longest_text(engine: Embedder) -> None:
    longest = plain_item(engine, 1, engine.info.request_tokens_max)
    assert len(await computed(engine, longest, longest)) == 2


async def leaves_nothing(engine: Embedder, chance: Random) -> None:
    """Check that requests which leave at random moments hold nothing, and that the others are whole."""

    async def ask(number: int, leaves_after_s: float | None) -> None:
        items = tuple(plain_item(engine, number * 100 + index, 2 + index % 40) for index in range(20))
        with trio.move_on_after(leaves_after_s or ENDED_WITHIN_S) as scope:
            assert len(await computed(engine, *items)) == len(items)
        assert leaves_after_s is not None or not scope.cancelled_caught

    for round_ in range(5):
        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(ask, round_ * 10 + number, chance.choice((None, chance.uniform(0, 0.03))))
    await at_rest(engine)


@pytest.mark.parametrize("name", FAMILIES)
async def test_an_embedder_equals_transformers_and_keeps_the_contract(name: str, make_embedder: MakeEmbedder) -> None:
    model = random_text_models() / name
    async with make_embedder(model_path=str(model), slots=4, **FAMILIES[name]) as engine:
        await equals_transformers(engine, model)
        await takes_the_longest_text(engine)
        await leaves_nothing(engine, Random(name))
        await at_rest(engine)
        if name in CONTRACT:
            await check_embedder(lambda: nullcontext(engine), tolerance=TOLERANCE)
        if name.startswith("bert"):
            assert engine.info.request_tokens_max == ENCODER_TOKENS


async def test_a_host_refuses_answers_pools_by_the_models_files_and_ends_with_its_scheduler(
    zygote: ZygoteProcess, tmp_path: Path
) -> None:
    model = copytree(random_text_models() / "bert-mean", tmp_path / "model")
    write_modules(model, {"pooling_mode_cls_token": True}, normalised=False)
    others = {*below({zygote.pid}, SCHEDULER)}
    async with forked_hosts(zygote) as (start_host, runtime), trio.open_nursery() as nursery:
        registration, ended = Registration[Embedder](), trio.Event()

        async def live(*, task_status: trio.TaskStatus[None]) -> None:
            with pytest.raises(EngineDied, match="engine vectors ended"):
                await run_embedder(spec, start_host, registration, runtime, task_status=task_status)
            ended.set()

        spec = evolve(SPEC, model_path=str(model))
        with trio.fail_after(STARTED_WITHIN_S):
            await nursery.start(live)
        engine = registration.current
        assert isinstance(engine, SglangEmbedder)
        assert (properties(engine).pooling, properties(engine).normalised) == (Pooling.CLS, False)

        async with engine.link.ask(Generate(new_id(), TokenIds.of([5]), Sampling(tokens_max=1)), 1) as answer:
            with pytest.raises(Unsupported, match="computes vectors, and no answers"):
                await answer.result()
        async with engine.link.ask(FlushCache(), 0) as answer:
            await answer.result()
        assert len(await computed(engine, plain_item(engine, 1, 5))) == 1

        [scheduler] = set(below({zygote.pid}, SCHEDULER)) - others
        os.kill(scheduler, signal.SIGSTOP)
        waiting = engine.submit(embed(plain_item(engine, 2, 5)))
        os.kill(scheduler, signal.SIGKILL)
        with trio.fail_after(ENDED_WITHIN_S):
            await ended.wait()
            with pytest.raises(EngineLost):
                await waiting.result()
        with pytest.raises(EngineLost):
            engine.submit(embed(plain_item(engine, 3, 5)))


async def test_a_model_that_pools_otherwise_is_refused_by_name(make_embedder: MakeEmbedder, tmp_path: Path) -> None:
    model = copytree(random_text_models() / "bert-mean", tmp_path / "model")
    write_modules(model, {"pooling_mode_max_tokens": True}, normalised=True)
    with pytest.RaisesGroup(pytest.RaisesExc(StartFailed, match="pools by max; only cls, mean and lasttoken")):
        async with make_embedder(model_path=str(model)):
            pass
