"""The prefix index: what it says of any prompt is what the workers' events say, in any order of events and sweeps."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.routing.policies.kv import index as prefix_index
from actors.routing.policies.kv.index import SHARDS, TOUCHED_FOR_STORED, TURN_MAX, PrefixIndex
from protocol.messages.kv_events import BlockChange, BlockEvent

STORED, REMOVED, CLEARED = BlockChange.STORED, BlockChange.REMOVED, BlockChange.CLEARED
PROMPTS = [[tree * 100 + depth for depth in range(8)] for tree in range(3)]
WORKERS = ["a", "b", "c", "d"]

TOUCHED_WITHIN = 64  # matches


def stored(*hashes: int, rank: int = 0) -> BlockEvent:
    return BlockEvent(STORED, rank, hashes)


def removed(*hashes: int, rank: int = 0) -> BlockEvent:
    return BlockEvent(REMOVED, rank, hashes)


@given(st.randoms(use_true_random=False), st.integers(5, 60))
@settings(max_examples=100, deadline=None)
def test_it_says_what_the_events_say(rng: random.Random, steps: int) -> None:
    index, truth = PrefixIndex(), defaultdict[tuple[str, int], set[int]](set)
    for _ in range(steps):
        worker, rank, prompt = rng.choice(WORKERS), rng.randrange(2), rng.choice(PROMPTS)
        match rng.randrange(6):
            case 0 | 1 | 2:
                stored_now = prompt[: rng.randrange(9)]
                index.apply(worker, [stored(*stored_now, rank=rank)])
                truth[worker, rank].update(stored_now)
            case 3:  # the ends of prompts first, as caches do
                first = rng.choice(prompt)
                gone = {block for each in PROMPTS if first in each for block in each[each.index(first) :]}
                index.apply(worker, [removed(*gone, rank=rank)])
                truth[worker, rank].difference_update(gone)
            case 4 if rng.random() < 0.5:
                index.forget(worker)
                truth[worker, 0], truth[worker, 1] = set(), set()
            case 4:
                index.apply(worker, [BlockEvent(CLEARED, rank)])
                truth[worker, rank] = set()
            case _:
                for _ in range(rng.choice([1, SHARDS])):
                    index.sweep()
        for each in PROMPTS:
            match = index.match(each)
            for name in WORKERS:
                for number in (0, 1):
                    has = truth[name, number]
                    expected = next((place for place, block in enumerate(each) if block not in has), len(each))
                    assert match.blocks(name, number) == expected
            longest = [match.blocks(*holder) for holder in match.longest(99)]
            assert longest == sorted(longest, reverse=True)
            assert all(longest)


def test_what_is_retired_while_a_sweep_runs_is_removed_by_the_next() -> None:
    index = PrefixIndex()
    index.apply("a", [stored(*range(1000))])
    index.apply("b", [stored(*range(1000))])
    index.forget("a")
    for _ in range(SHARDS // 2):
        index.sweep()
    index.forget("b")
    index.apply("c", [stored(7)])  # must not get the bit of either
    for _ in range(SHARDS // 2):
        index.sweep()
    assert index.unswept
    assert index.match([7]).blocks("c") == 1
    assert index.match([8]).groups == ()
    for _ in range(SHARDS):
        index.sweep()
    assert index.statistics().blocks == 1


def test_blocks_that_are_dropped_count_no_more() -> None:
    index, rng, ever = PrefixIndex(2 * SHARDS), random.Random(1), set[int]()
    for _ in range(300):
        worker, numbers = rng.choice(WORKERS), rng.sample(range(2**20), 20)
        ever.update(numbers)
        event = stored if rng.random() < 0.8 else removed
        index.apply(worker, [event(*numbers)])
        if rng.random() < 0.05:
            index.forget(rng.choice(WORKERS))
        if rng.random() < 0.3:
            index.sweep()
    assert index.statistics().dropped > 1000
    while index.unswept:
        index.sweep()
    assert index.statistics().blocks == sum(bool(index.match([number]).groups) for number in ever)


def test_of_a_prefix_the_end_is_dropped_first() -> None:
    index = PrefixIndex(2 * SHARDS)
    prompt = [block * SHARDS for block in (1, 2, 3)]
    index.apply("a", [stored(*prompt)])
    assert index.match(prompt).blocks("a") == 2


@pytest.mark.parametrize(
    "event", [BlockEvent(STORED, 0, (1,), medium="CPU_PINNED"), BlockEvent(STORED, 0, (1,), lora="poet")]
)
def test_blocks_that_a_prefill_cannot_use_are_left_out(event: BlockEvent) -> None:
    index = PrefixIndex()
    index.apply("a", [event])
    assert index.match([1]).groups == ()


def test_prompts_in_use_are_kept_however_long_they_are() -> None:
    index, numbers = PrefixIndex(20 * TURN_MAX), iter(random.Random(2).sample(range(2**40), 400_000))
    prompts = [tuple(islice(numbers, length)) for length in (3 * TURN_MAX + 5, TURN_MAX + 1, TURN_MAX, 40)]
    for prompt in prompts:
        index.apply("a", [stored(*prompt)])
    for _ in range(120):
        for _ in range(TOUCHED_WITHIN // 4):
            for prompt in prompts:
                index.match(prompt)
        index.apply("b", [stored(*islice(numbers, 3000))])
    assert index.statistics().dropped > 10 * TURN_MAX
    assert [index.match(prompt).blocks("a") for prompt in prompts] == [len(prompt) for prompt in prompts]


def test_a_match_moves_no_block_and_a_stored_one_a_limited_number(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = list[int]()

    class Shard(OrderedDict[int, int]):
        def move_to_end(self, key: int, last: bool = True) -> None:
            moved.append(key)
            super().move_to_end(key, last)

    monkeypatch.setattr(prefix_index, "OrderedDict", Shard)
    index, prompt = PrefixIndex(20 * TURN_MAX), tuple(range(15 * TURN_MAX))
    index.apply("a", [stored(*prompt)])
    moved.clear()
    for _ in range(TOUCHED_WITHIN):
        index.match(prompt)
    assert moved == []
    for turn in range(1, 5 * TURN_MAX, 100):
        index.apply("b", [stored(*range(-turn, -turn - 100, -1))])
        assert len(moved) <= TOUCHED_FOR_STORED * (turn + 99)
    assert moved == [*reversed(prompt)], "once, though it was matched often"


def test_a_prompt_is_touched_again_once_a_part_of_the_index_has_been_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = list[int]()

    class Shard(OrderedDict[int, int]):
        def move_to_end(self, key: int, last: bool = True) -> None:
            moved.append(key)
            super().move_to_end(key, last)

    monkeypatch.setattr(prefix_index, "OrderedDict", Shard)
    index, numbers = PrefixIndex(64 * SHARDS), iter(range(10**6))
    index.apply("a", [stored(*islice(numbers, 48 * SHARDS))])
    prompt = [*islice(numbers, 32)]
    index.apply("a", [stored(*prompt)])
    moved.clear()
    for _ in range(int(8 * SHARDS * 4)):
        prompt.append(next(numbers))  # the next turn of a conversation
        index.match(prompt)
        index.apply("a", [stored(prompt[-1])])
    assert 4 <= moved.count(prompt[0]) <= 5


def test_a_sweep_looks_at_a_limited_number_of_blocks_and_bears_what_changes_meanwhile() -> None:
    index, size = PrefixIndex(10**7), 2 * TURN_MAX + 9
    blocks = [SHARDS * place for place in range(size)]  # of one shard
    index.apply("a", [stored(*blocks)])
    index.apply("b", [stored(*blocks[:5])])
    index.forget("a")
    left = list[int]()
    for _ in range(3):
        index.sweep()
        left.append(index.statistics().blocks)
        index.apply("b", [(stored if len(left) == 1 else removed)(*blocks[5:8])])  # which the first part had
    assert left == [size - TURN_MAX + 5, size - 2 * TURN_MAX + 5 + 3, 5]
    while index.unswept:
        index.sweep()
    assert index.statistics().blocks == 5


@pytest.mark.parametrize("chains", range(1, 17))
def test_what_is_used_often_is_kept_in_whichever_order_its_turns_come(chains: int) -> None:
    index, numbers = PrefixIndex(64 * SHARDS), iter(random.Random(1).sample(range(2**40), 100_000))
    hot = [tuple(islice(numbers, 32)) for _ in range(chains)]
    for hashes in hot:
        index.apply("a", [stored(*hashes)])
    for turn in range(4000):
        index.match(hot[turn % chains])
        for other in ("b", "c"):
            index.apply(other, [stored(*islice(numbers, 5))])
    assert index.statistics().dropped > 20_000, "more than it has room for"
    assert [index.match(hashes).blocks("a") for hashes in hot] == [32] * chains
