"""KV memory of a simulated engine: pages are conserved, kept by their holders, and shared by equal prefixes only."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from actors.engines.simulated.engine import SimulatedEngine
from actors.engines.simulated.kv_memory import KvMemory, Lease
from protocol.block_hashes import block_digests, root_digest
from protocol.errors import AskerLeft
from protocol.messages.generation import Generate, Usage
from protocol.token_ids import TokenIds
from tests.rig.simulated_engines import generate, read, running, spec

SIZE = 2  # tokens a page
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=9)  # so short of variety that prefixes meet


def digests(tokens: list[int], salt: str | None = None) -> list[bytes]:
    return block_digests(root_digest(salt), TokenIds.of(tokens).packed, SIZE)


# Few prompts, most of them with a prefix in common, so that pages are found again before they are evicted.
few = st.builds(lambda length, end: [0] * length + end, st.integers(2, 8), st.lists(st.integers(0, 1), max_size=2))
ask = st.tuples(st.just("take"), few, st.integers(0, 3))
changes = ["publish", "publish", "look up", "look up", "release", "release", "flush", "extend"]
other = st.tuples(st.sampled_from(changes), st.integers(0, 20))


@settings(max_examples=300)
@given(st.integers(4, 12), st.lists(st.one_of(ask, other, other), min_size=5, max_size=60))
def test_pages_are_conserved_and_none_is_taken_from_its_holder(pages_max: int, moves: list[Any]) -> None:
    memory = KvMemory(pages_max)
    held: list[tuple[Lease, list[bytes], int]] = []
    published: set[bytes] = set()
    for move in moves:
        match move:
            case ["take", tokens, more]:
                prompt_digests, wanted = digests(tokens), len(tokens) // SIZE + more
                before = memory.cached_prefix(prompt_digests)
                free, idle = memory.free, memory.idle
                lease = memory.take(prompt_digests, wanted)
                if lease is None:
                    assert (memory.free, memory.idle) == (free, idle), "nothing changed"
                    assert wanted > free, "what fits is never refused"
                else:
                    assert lease.shared == prompt_digests[:before]
                    assert set(lease.shared) <= published, "only what was computed is shared"
                    held.append((lease, prompt_digests, wanted))
            case ["publish", place] if held:
                publish(memory, held, published, place)
            case ["look up", place] if held:
                look_up(memory, *held[place % len(held)][:2])
            case ["release", place] if held:
                memory.release(held.pop(place % len(held))[0])
            case ["extend", place] if held:
                lease, prompt_digests, wanted = held[place % len(held)]
                there_is = memory.free + memory.idle > 0
                assert memory.extend(lease) is there_is
                held[place % len(held)] = lease, prompt_digests, wanted + there_is
            case ["flush", _]:
                memory.flush()
        check(memory, held, published)
    for lease, _, _ in held:
        memory.release(lease)
        memory.release(lease)
    check(memory, [], published)
    assert memory.free + memory.idle == pages_max
    assert memory.take([], pages_max) is not None, "idle pages give way"


def publish(memory: KvMemory, held: list[tuple[Lease, list[bytes], int]], published: set[bytes], place: int) -> None:
    lease, prompt_digests, _ = held[place % len(held)]
    for digest in prompt_digests[len(lease.shared) :]:
        published.add(digest)
        memory.publish(lease, digest)
        check(memory, held, published)


def look_up(memory: KvMemory, lease: Lease, prompt_digests: list[bytes]) -> None:
    """Share the next page of a prompt if that is cached."""
    if len(lease.shared) < len(prompt_digests):
        digest = prompt_digests[len(lease.shared)]
        there = memory.cached_prefix([digest]) == 1
        assert memory.share(lease, digest) is there


def check(memory: KvMemory, held: list[tuple[Lease, list[bytes], int]], published: set[bytes]) -> None:
    own = sum(lease.own for lease, _, _ in held)
    shared = {digest for lease, _, _ in held for digest in lease.shared}
    assert memory.free >= 0
    assert memory.free + memory.idle + memory.referenced + own == memory.pages_max
    assert memory.referenced == len(shared), "a shared page counts once"
    cached = sum(memory.cached_prefix([digest]) for digest in published)
    assert cached == memory.referenced + memory.idle, "what is held is not idle"
    for lease, prompt_digests, wanted in held:
        assert lease.shared == prompt_digests[: len(lease.shared)], "a cached prefix is a prefix"
        assert lease.own + len(lease.shared) == wanted, "what was leased stays leased"
        assert memory.cached_prefix(lease.shared) == len(lease.shared), "what is held is not evicted"


def stored(memory: KvMemory, tokens: list[int]) -> list[bytes]:
    """Cache all pages of some tokens for nobody."""
    prompt_digests = digests(tokens)
    lease = memory.take(prompt_digests, len(prompt_digests))
    assert lease is not None
    for digest in prompt_digests[len(lease.shared) :]:
        memory.publish(lease, digest)
    memory.release(lease)
    return prompt_digests


def test_the_least_recently_used_page_is_evicted_first() -> None:
    memory = KvMemory(6)
    first, second, third = (stored(memory, [number] * 4) for number in range(3))
    again = memory.take(first, 2)
    assert again is not None
    memory.release(again)
    assert memory.take([], 3) is not None
    assert [memory.cached_prefix(prompt_digests) for prompt_digests in (first, second, third)] == [2, 0, 1]


# The cache as requests see it -------------------------------------------------------------


async def usage(engine: SimulatedEngine, request: Generate) -> Usage:
    return (await read(engine.submit(request)))[1].usage


@pytest.mark.parametrize(("length", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
async def test_cached_tokens_are_whole_pages_and_never_the_whole_prompt(
    length: int, cached: int, autojump_clock: MockClock
) -> None:
    prompt = list(range(length))
    async with running(spec(page_size=4)) as engine:
        assert (await usage(engine, generate("a", prompt))).cached_tokens == 0
        assert (await usage(engine, generate("b", prompt))).cached_tokens == cached


async def test_a_salt_isolates(autojump_clock: MockClock) -> None:
    prompt = list(range(9))
    async with running() as engine:
        asked: list[tuple[str | None, Usage]] = [
            (salt, await usage(engine, generate(f"{n}", prompt, salt=salt))) for n, salt in enumerate("xyx")
        ]
        asked.append((None, await usage(engine, generate("4", prompt))))
        assert [each.cached_tokens for _, each in asked] == [0, 0, 8, 0]


async def test_a_continued_conversation_finds_the_answer_cached_too(autojump_clock: MockClock) -> None:
    async with running() as engine:
        first = generate("a", list(range(6)), tokens_max=8)
        ids, _, _ = await read(engine.submit(first))
        # 13 of the 14 tokens were computed: nobody needed the last one's keys and values.
        assert (await usage(engine, generate("b", [*first.tokens, *ids, 1, 2]))).cached_tokens == 12


async def test_an_aborted_request_leaves_what_it_has_computed(autojump_clock: MockClock) -> None:
    prompt = list(range(12))
    async with running(spec(prefill_chunk=4)) as engine:
        left = engine.submit(generate("a", prompt))
        await trio.sleep(1.5)
        engine.abort("a")
        with pytest.raises(AskerLeft):
            await left.result()
        assert (await usage(engine, generate("b", prompt))).cached_tokens == 4
