"""The simulated engine keeps the contract of every engine."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
from attrs import evolve
from trio.testing import MockClock

from actors.engines.request_check import check_request
from actors.engines.simulated.engine import SimulatedEngine
from actors.engines.simulated.spec import Costs
from protocol.errors import BadRequest, Unsupported
from protocol.messages.engine import EngineInfo
from protocol.messages.generation import Grammar, GrammarKind
from protocol.messages.media import MediaForm
from tests.contracts import engine as contract
from tests.rig.encoders import MEDIA
from tests.rig.simulated_engines import generate, running, spec
from tests.system.simulator import simulate

COSTS = Costs(fixed_s=0.01, per_prefill_token_s=0.0001, per_running_s=0.001, per_kv_token_s=0.000001)
LINES = [[7, 8, 9], [10, 11, 12, 13, 14], [15]]
SPECS = {
    "plain": {},
    "pages that do not divide the memory": {"page_size": 7, "kv_tokens_max": 1500},
    "no cache": {"prefix_cache": False},
    "adapters": {"adapters_max": 2},
    "two slots": {"slots": 2, "waiting_max": 1},
    "little memory": {"kv_tokens_max": 256, "context_max": 300},
    "tiny chunks": {"prefill_chunk": 3},
    "ends by itself": {"eos_id": 99, "length_min": 1, "length_max": 40},
    "slow to release": {"costs": Costs(fixed_s=0.01, release_s=0.5)},
    "a mixture of experts": {"experts": 8},
    "a tiny vocabulary": {"vocabulary_size": 16},
    "images as embeddings": {"media": MEDIA},
    "images as pixels, and no cache": {"media": evolve(MEDIA, form=MediaForm.PIXELS), "prefix_cache": False},
    "images, and pages of one token": {"media": MEDIA, "page_size": 1},
}


@pytest.mark.parametrize("changes", SPECS.values(), ids=SPECS.keys())
async def test_the_simulated_engine_keeps_the_contract(changes: dict[str, Any], autojump_clock: MockClock) -> None:
    await contract.check_engine(partial(running, spec(**({"costs": COSTS} | changes))))


async def test_where_memory_is_short_the_simulated_engine_goes_by_priority(autojump_clock: MockClock) -> None:
    async with running(spec(costs=COSTS, kv_tokens_max=512, slots=8)) as engine:
        await contract.check_short_memory(engine)


@pytest.mark.parametrize("changes", [{}, {"eos_id": 99, "length_min": 20, "length_max": 30}])
async def test_an_engine_that_answers_in_sentences_keeps_the_contract(
    changes: dict[str, int], autojump_clock: MockClock
) -> None:
    await contract.check_engine(partial(running, spec(costs=COSTS, **changes), LINES))


@pytest.mark.parametrize("seed", range(3))
def test_the_contract_holds_in_any_order_of_tasks(seed: int) -> None:
    async def scenario(rng: random.Random) -> None:
        await contract.check_engine(partial(running, spec(costs=COSTS, page_size=rng.choice((1, 4, 16)))))

    simulate(scenario, seed)


# Refusals ---------------------------------------------------------------------------------


async def test_a_grammar_is_refused_by_name(autojump_clock: MockClock) -> None:
    async with running() as engine:
        with pytest.raises(Unsupported, match="regex") as caught:
            engine.submit(generate("a", grammar=Grammar(GrammarKind.REGEX, "a*")))
        assert caught.value.param == "grammar"
        assert engine.info.grammars == ()


INFO = EngineInfo("any", "1", 100, 64, 128, 60, 4, 16, honours_seed=True, grammars=(GrammarKind.REGEX,))


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"logit_bias": {100: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias"),
        ({"logprobs": 101}, "logprobs"),
        ({"tokens_min": 4}, "tokens_min"),
        ({"tokens_min": 1, "grammar": Grammar(GrammarKind.REGEX, "a")}, "tokens_min"),
        ({"tokens_max": 0}, "tokens_max"),
        ({"stop_token_ids": (100,)}, "stop_token_ids"),
        ({"prompt": 0}, None),  # its own words, not those about `resumed_tokens`
        ({"prompt": 58}, None),
    ],
)
def test_what_no_engine_could_do_is_refused_with_the_field_at_fault(changes: dict[str, Any], param: str | None) -> None:
    with pytest.raises(BadRequest) as caught:
        check_request(generate("a", **changes), INFO)
    assert caught.value.param == param


# The section of cluster.toml --------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"kv_tokens_max": 31, "page_size": 16}, "kv_tokens_max"),
        ({"context_max": 1}, "context_max"),
        ({"length_min": 10, "length_max": 9}, "length_min"),
        ({"eos_id": 100}, "eos_id"),
    ],
)
def test_keys_that_disagree_are_named_and_no_engine_is_made_of_them(changes: dict[str, int], path: str) -> None:
    wrong = spec(**changes)
    assert [mistake.path for mistake in wrong.disagreements()] == [path]
    with pytest.raises(ValueError, match=path):
        SimulatedEngine(wrong, random.Random(0))
