"""Prompts that wait for the one that computes their beginning; tests/system/sglang has the same with the real engine."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from attrs import define, evolve, field

from actors.engines.sglang.host.shared_prompts import compute_once, shares

PAGE = 16
SAME = tuple(range(100, 200))


@define(eq=False)
class Req:
    """A request, as far as SGLang's scheduler shows it here."""

    tokens: Sequence[int] = SAME
    prefix_len: int = 0
    extend_end: int | None = None
    output_ids: list[int] = field(factory=list)
    extra_key: str | None = None
    cache_salt: str | None = None
    positional_embed_overrides: object = None
    prefix_max: int | None = None

    @property
    def full_untruncated_fill_ids(self) -> array[int]:
        return array("q", self.tokens)

    def _compute_max_prefix_len(self, input_len: int) -> int:
        return input_len - 1 if self.prefix_max is None else self.prefix_max


@define
class Cache:
    disable: bool = False
    mamba: bool = False

    def supports_mamba(self) -> bool:
        return self.mamba


@define
class Batch:
    reqs: list[Req]


@define(eq=False, slots=False)
class Adder:
    can_run_list: list[Any] = field(factory=list)
    running_batch: Batch | None = None
    tree_cache: Cache = field(factory=Cache)
    page_size: int = PAGE
    dllm_config: object = None

    def add_one_req(self, req: Req, has_chunked_req: bool) -> str:
        self.can_run_list.append(evolve(req, extend_end=len(req.tokens)))
        return f"added {has_chunked_req}"


COMPUTED = Req(extend_end=len(SAME))


@pytest.mark.parametrize(
    ("req", "other", "waits"),
    [
        (Req(), COMPUTED, True),
        (Req(SAME[:33]), COMPUTED, True),
        (Req(SAME[:32]), COMPUTED, False),  # of its two pages the first alone would be found
        (Req(SAME[:31] + (7,) * 9), COMPUTED, False),  # two pages are shared, but for a token
        (Req((7, *SAME[1:])), COMPUTED, False),
        (Req(prefix_len=48), COMPUTED, True),
        (Req(prefix_len=80), COMPUTED, False),  # too little is left
        (Req(), evolve(COMPUTED, prefix_len=31), True),
        (Req(), evolve(COMPUTED, prefix_len=32), False),  # cached already, but not found
        (Req(), evolve(COMPUTED, extend_end=32), True),  # a part of it, the next one will be computed later
        (Req(), evolve(COMPUTED, extend_end=31), False),
        (Req(prefix_len=32), evolve(COMPUTED, extend_end=32), False),
        (Req(), evolve(COMPUTED, extend_end=None), False),
        (Req(cache_salt="a"), COMPUTED, False),
        (Req(cache_salt="a"), evolve(COMPUTED, cache_salt="a"), True),
        (Req(extra_key="adapter"), COMPUTED, False),
        (Req(prefix_max=0), COMPUTED, False),  # it asks for what is known of the prompt's tokens
        (Req(positional_embed_overrides=[1]), COMPUTED, False),
    ],
)
def test_a_prompt_waits_for_what_another_computes_and_it_would_find(req: Req, other: Req, *, waits: bool) -> None:
    assert shares(Adder([other]), req) is waits
    assert shares(Adder(running_batch=Batch([other])), req) is waits, "computed, but not in the cache yet"
    assert not shares(Adder(running_batch=Batch([evolve(other, output_ids=[1])])), req), "it is in the cache by now"


@pytest.mark.parametrize(
    "adder",
    [
        Adder([COMPUTED], tree_cache=Cache(disable=True)),
        Adder([COMPUTED], tree_cache=Cache(mamba=True)),
        Adder([COMPUTED], dllm_config=object()),
        Adder([COMPUTED], page_size=128),
        Adder(),
    ],
)
def test_no_prompt_waits_where_nothing_would_be_found(adder: Adder) -> None:
    assert not shares(adder, Req())


def test_a_prompt_that_is_running_waits_for_no_other_part_of_itself() -> None:
    assert not shares(Adder([COMPUTED]), COMPUTED)


def test_an_adder_passes_a_waiting_prompt_by() -> None:
    patched: Any = type("Patched", (Adder,), {})
    compute_once(patched, "go on")
    adder = patched()
    assert adder.add_one_req(Req(), has_chunked_req=True) == "added True"
    assert adder.add_one_req(Req(), has_chunked_req=False) == "go on"
    assert adder.add_one_req(Req((1,) * 50), has_chunked_req=False) == "added False"
    assert len(adder.can_run_list) == 2
