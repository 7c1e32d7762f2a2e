"""Prompts that wait for the one that computes their beginning; tests/system/sglang has the same with the real engine."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import pytest
from attrs import Factory, define, evolve, field

from actors.engines.sglang.host import shared_prompts
from actors.engines.sglang.host.shared_prompts import WAITS_MAX, Computed, compute_once

PAGE = 16
SAME = tuple(range(100, 200))
OTHER = (1,) * 50


@define
class Params:
    max_new_tokens: int = 10


@define(eq=False)
class Req:
    """A request, as far as SGLang's scheduler shows it here."""

    tokens: Sequence[int] = SAME
    prefix_len: int = 0
    extend_end: int | None = None
    output_ids: list[int] = Factory(list)
    extra_key: str | None = None
    cache_salt: str | None = None
    positional_embed_overrides: object = None
    prefix_max: int | None = None
    sampling_params: Params = Factory(Params)
    skip_radix_cache_insert: bool = False
    espalier_waits: tuple[int, int] = (-1, 0)

    @property
    def full_untruncated_fill_ids(self) -> array[int]:
        return array("q", self.tokens)

    def _compute_max_prefix_len(self, input_len: int) -> int:
        return input_len - 1 if self.prefix_max is None else self.prefix_max


@define
class Cache:
    disable: bool = False
    mamba: bool = False
    swa: bool = False
    buffer_pipeline: object = None

    def supports_mamba(self) -> bool:
        return self.mamba

    def supports_swa(self) -> bool:
        return self.swa


@define
class Budget:
    total_offset: int = 0


class Result(Enum):
    CONTINUE = 1
    NO_TOKEN = 2
    OTHER = 3


@define
class Batch:
    reqs: list[Req]
    decoding_reqs: list[Req] | None = None


@define(eq=False, slots=False)
class Adder:
    can_run_list: list[Req] = field(factory=list)
    memory: int = 10_000
    rem_chunk_tokens: int | None = None
    max_running_requests: int | None = None
    tree_cache: Cache = field(factory=Cache)
    memory_budget: Budget = field(factory=Budget)
    page_size: int = PAGE
    running_batch: Batch | None = None
    preempt_list: list[Req] = field(factory=list)

    def add_one_req(self, req: Req, *arguments: object, **named: object) -> object:
        assert (arguments, named) == ((), {"has_chunked_req": False})
        needed = len(req.tokens) - req.prefix_len
        if self.memory_budget.total_offset + needed > self.memory:
            return Result.NO_TOKEN
        if self.rem_chunk_tokens is not None:
            needed = min(needed, self.rem_chunk_tokens)
            self.rem_chunk_tokens -= needed
        self.memory_budget.total_offset += needed
        req.extend_end = req.prefix_len + needed
        self.can_run_list.append(req)
        return Result.CONTINUE


@define(eq=False, slots=False)
class Scheduler:
    """SGLang's, with a cache that has what was computed once `result` was called."""

    adder_class: type[Adder]
    waiting: list[Req]
    memory: int = 10_000
    chunk: int | None = None
    slots: int | None = None
    running: list[Req] = field(factory=list)
    preempted: list[Req] = field(factory=list)
    tree_cache: Cache = field(factory=Cache)
    dllm_config: object = None
    min_free_slots_delayer: object = None
    cached: list[Sequence[int]] = field(factory=list)
    full: bool = False
    mixed: Batch | None = None

    def _get_new_batch_prefill_raw(self, running: object) -> tuple[Batch | None, object]:
        if self.mixed is not None:
            return self.mixed, running
        adder = self.adder_class(
            memory=self.memory,
            rem_chunk_tokens=self.chunk,
            max_running_requests=self.slots,
            running_batch=Batch(self.running),
            preempt_list=self.preempted,
        )
        for req in self.waiting:
            req.prefix_len = max((common(req.tokens, tokens) for tokens in self.cached), default=0)
            if (result := adder.add_one_req(req, has_chunked_req=False)) is not Result.CONTINUE:
                self.full = result is Result.NO_TOKEN
                break
        self.waiting = [req for req in self.waiting if req not in adder.can_run_list]
        return (Batch(adder.can_run_list) if adder.can_run_list else None), running

    def step(self) -> list[Req]:
        batch, _ = self._get_new_batch_prefill_raw(None)
        return [] if batch is None else batch.reqs

    def result(self, reqs: list[Req], *, cached: bool = True) -> None:
        for req in reqs:
            req.output_ids.append(1)
            self.cached += [req.tokens] * cached


def common(left: Sequence[int], right: Sequence[int]) -> int:
    same = next((place for place, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), len(right))
    return min(same, len(left) - 1) // PAGE * PAGE


def waits(adder: Any, req: Req, computed: list[Computed]) -> bool:
    """Call the function of this name; SGLang's classes differ from those here in what it does not use."""
    return shared_prompts.waits(adder, req, computed)


MakeScheduler = Callable[..., Scheduler]


@pytest.fixture
def scheduler() -> MakeScheduler:
    def make(*reqs: Req, stages: int = 1, **named: Any) -> Scheduler:
        patched: Any = type("PatchedAdder", (Adder,), {})
        made: Any = type("PatchedScheduler", (Scheduler,), {})
        results: Any = Result
        compute_once(made, patched, results, 4_096, lambda: stages)
        scheduler: Scheduler = made(patched, [*reqs], **named)
        return scheduler

    return make


COMPUTED = Req(extend_end=len(SAME))


@pytest.mark.parametrize(
    ("req", "other", "expected"),
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
        (Req(skip_radix_cache_insert=True), COMPUTED, False),
        (Req(), evolve(COMPUTED, tokens=SAME[:20]), False),  # shortened since
    ],
)
def test_a_prompt_waits_for_what_another_computes_and_it_would_find(req: Req, other: Req, *, expected: bool) -> None:
    assert waits(Adder(), evolve(req), [Computed.by(other)]) is expected


@pytest.mark.parametrize("adder", [Adder(page_size=128), Adder(preempt_list=[COMPUTED])])
def test_no_prompt_waits_for_less_than_a_page_or_where_others_made_room_for_it(adder: Adder) -> None:
    assert not waits(adder, Req(), [Computed.by(COMPUTED)])


@pytest.mark.parametrize(
    "changes",
    [
        {"tree_cache": Cache(disable=True)},
        {"tree_cache": Cache(mamba=True)},
        {"tree_cache": Cache(swa=True)},
        {"tree_cache": Cache(buffer_pipeline=object())},
        {"dllm_config": object()},
        {"min_free_slots_delayer": object()},
        {"stages": 2},
    ],
    ids=str,
)
def test_no_prompt_waits_where_nothing_would_be_found_in_the_next_step(
    scheduler: MakeScheduler, changes: dict[str, Any]
) -> None:
    assert len(scheduler(Req(), Req(), **changes).step()) == 2


@pytest.mark.parametrize("unusable", [{"positional_embed_overrides": [1]}, {"skip_radix_cache_insert": True}], ids=str)
def test_no_prompt_waits_for_one_that_is_not_cached(scheduler: MakeScheduler, unusable: dict[str, Any]) -> None:
    assert len(scheduler(Req(**unusable), Req()).step()) == 2


def test_a_burst_computes_its_beginning_once(scheduler: MakeScheduler) -> None:
    first, *others = burst = [Req(), Req(), Req(OTHER), Req()]
    made = scheduler(*burst)
    assert made.step() == [first, burst[2]], "another prompt does not wait"
    made.result([first, burst[2]])
    assert made.step() == [burst[1], burst[3]]
    assert [req.prefix_len for req in others] == [96, 0, 96]


def test_a_scheduler_that_runs_ahead_computes_it_once_as_well(scheduler: MakeScheduler) -> None:
    first, second, later = Req(), Req(), Req()
    made = scheduler(first, second)
    assert made.step() == [first]
    made.waiting.append(later)
    assert made.step() == [], "the result of the last step is not known yet"
    made.result([first])
    assert made.step() == [second, later]


def test_a_wait_in_vain_is_the_last_but_one(scheduler: MakeScheduler) -> None:
    burst = [Req() for _ in range(5)]
    made, steps = scheduler(*burst), list[int]()
    while made.waiting:
        steps.append(len(reqs := made.step()))
        made.result(reqs, cached=False)
    assert steps == [1, 1, 3], "one for each wait, and then all"
    assert len(steps) == 1 + WAITS_MAX


def test_what_is_found_more_begins_the_count_of_waits_anew(scheduler: MakeScheduler) -> None:
    chunk, waiting = Req(SAME[:48], extend_end=48), Req()
    made = scheduler(waiting)
    for end in range(48, 96, 16):
        computed = [Computed.by(evolve(chunk, prefix_len=end - 48, tokens=SAME[:end], extend_end=end))]
        waiting.prefix_len = end - 48
        assert [waits(Adder(), waiting, computed) for _ in range(3)] == [True, True, False]
    assert made.step() == [waiting]


def test_what_a_waiting_prompt_needs_is_given_to_no_later_one(scheduler: MakeScheduler) -> None:
    first, waiting, later = Req(), Req(), Req(OTHER)
    made = scheduler(first, waiting, later, memory=250)
    assert made.step() == [first]
    assert not made.full, "else nobody would be added before an answer has ended"
    made.result([first])
    assert made.step() == [waiting, later]


def test_later_prompts_take_no_slot_of_those_that_wait(scheduler: MakeScheduler) -> None:
    running, first, waiting, later = Req(OTHER), Req(), Req(), Req(OTHER)
    made = scheduler(first, waiting, later, slots=3, running=[running])
    assert made.step() == [first]
    assert not made.full
    assert scheduler(Req(), Req(), Req(OTHER), slots=4, running=[running]).step()[1:] != []


def test_later_prompts_of_several_steps_do_not_begin_before_those_that_wait(scheduler: MakeScheduler) -> None:
    first, waiting, short, long = Req(), Req(), Req(OTHER), Req((2,) * 500)
    made = scheduler(first, waiting, short, long, chunk=200)
    assert made.step() == [first, short], "the others would take all of the next steps"
    made.result([first, short])
    assert made.step() == [waiting, long]


def test_answers_of_a_mixed_step_are_nothing_to_wait_for(scheduler: MakeScheduler) -> None:
    made = scheduler()
    answer, prompt = Req(SAME, prefix_len=0, extend_end=len(SAME)), Req(OTHER, extend_end=len(OTHER))
    made.mixed = Batch([prompt, answer], [answer])
    assert made.step() == [prompt, answer]
    made.waiting, made.mixed = [Req(), Req(OTHER)], None
    assert [req.tokens for req in made.step()] == [SAME], "the other one waits"


def test_what_is_evicted_is_no_reason_to_wait_again() -> None:
    computed, req = [Computed.by(COMPUTED)], Req(prefix_len=32)
    assert [waits(Adder(), req, computed) for _ in range(3)] == [True, True, False]
    req.prefix_len = 16
    assert not waits(Adder(), req, computed)


def test_a_step_without_memory_is_full_if_nobody_waits(scheduler: MakeScheduler) -> None:
    made = scheduler(Req(), Req(OTHER), memory=120)
    assert len(made.step()) == 1
    assert made.full
