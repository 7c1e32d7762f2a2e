"""The events of simulated engines in SGLang's form: what our own receiver of SGLang's events reads, and what is kept."""

from __future__ import annotations

import random

import msgspec
import pytest
import trio
from trio.testing import MockClock

from actors.engines.sglang.host.kv_events import translated
from actors.engines.simulated.cache_events import CacheChange
from actors.engines.simulated.engine import SimulatedEngine
from protocol.block_hashes import block_hashes
from protocol.kv_events import BlockChange, BlockEvent
from supervisor.engines.simulated.event_batches import KEPT_BYTES_MAX, KEPT_MAX, EventBatches, encoded
from tests.rig.fake_engine import running_engine
from tests.rig.simulated_engines import generate, read, spec

STORED, REMOVED, CLEARED = BlockChange.STORED, BlockChange.REMOVED, BlockChange.CLEARED
CHANGES = [
    CacheChange(BlockEvent(STORED, 0, (-5, 7), 3), (1, 2, 3, 4)),
    CacheChange(BlockEvent(REMOVED, 0, (9,))),
    CacheChange(BlockEvent(CLEARED)),
]


def made(now: float = 12.5) -> EventBatches:
    return EventBatches(2, lambda: now)


def test_a_batch_is_what_sglang_would_send() -> None:
    assert msgspec.msgpack.decode(encoded(CHANGES, 2, 12.5)) == [
        12.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": [-5, 7],
                "parent_block_hash": 3,
                "token_ids": [1, 2, 3, 4],
                "block_size": 2,
                "lora_id": None,
                "medium": "GPU",
            },
            {"type": "BlockRemoved", "block_hashes": [9], "medium": "GPU"},
            {"type": "AllBlocksCleared"},
        ],
        0,
    ]


def test_the_receiver_of_real_events_reads_the_same() -> None:
    assert list(translated(encoded(CHANGES, 2, 1.0), 0)) == [change.event for change in CHANGES]


async def test_batches_are_numbered_and_sent_in_order(autojump_clock: MockClock) -> None:
    batches = made()
    batches.put(CHANGES[:1])
    batches.put(CHANGES[1:])
    numbers = [int.from_bytes((await batches.next())[0], "big") for _ in range(2)]
    assert numbers == [0, 1]
    with trio.move_on_after(1) as waiting:
        await batches.next()
    assert waiting.cancelled_caught


def test_the_latest_batches_are_kept() -> None:
    batches = made()
    for _ in range(KEPT_MAX + 5):
        batches.put(CHANGES[2:])
    assert len(batches.since(0)) == KEPT_MAX
    assert [int.from_bytes(number, "big") for number, _ in batches.since(KEPT_MAX + 3)] == [KEPT_MAX + 3, KEPT_MAX + 4]
    assert batches.since(KEPT_MAX + 5) == []
    assert batches.since(2**63) == []


LARGE = [CacheChange(BlockEvent(STORED, 0, (1,)), (2**31,) * 200_000)]


def test_few_large_batches_are_kept() -> None:
    batches = made()
    for _ in range(20):
        batches.put(LARGE)
    kept = batches.since(0)
    assert sum(len(payload) for _, payload in kept) <= KEPT_BYTES_MAX
    assert len(kept) == KEPT_BYTES_MAX // len(kept[0][1])
    assert int.from_bytes(kept[-1][0], "big") == 19


async def unsent(batches: EventBatches) -> list[int]:
    """Return the numbers of the batches that are sent next."""
    numbers = list[int]()
    with trio.move_on_after(1):
        while True:
            numbers.append(int.from_bytes((await batches.next())[0], "big"))
    return numbers


async def test_what_nobody_sends_is_dropped_and_seen_as_a_gap(autojump_clock: MockClock) -> None:
    batches = made()
    for _ in range(KEPT_MAX + 3):
        batches.put(CHANGES[2:])
    assert await unsent(batches) == list(range(3, KEPT_MAX + 3))


async def test_large_batches_that_nobody_sends_take_no_more_memory_than_those_that_are_kept(
    autojump_clock: MockClock,
) -> None:
    batches = made()
    for _ in range(20):
        batches.put(LARGE)
    kept = [int.from_bytes(number, "big") for number, _ in batches.since(0)]
    assert await unsent(batches) == kept
    batches.put(CHANGES)
    assert await unsent(batches) == [20]


@pytest.mark.parametrize("salt", [None, "tenant"])
async def test_an_engine_tells_of_its_blocks_with_their_tokens(salt: str | None, autojump_clock: MockClock) -> None:
    told = list[CacheChange]()
    engine = SimulatedEngine(spec(), random.Random(0), tell=told.extend)
    async with running_engine(engine):
        request = generate("a", 10, 7, salt=salt)
        ids, _, _ = await read(engine.submit(request))
        await engine.flush_cache()
    first, *stored, last = told
    assert (first.event.change, last.event.change) == (CLEARED, CLEARED)
    everything = [*request.tokens, *ids][:16]
    assert [token for change in stored for token in change.tokens] == everything
    hashes = [number for change in stored for number in change.event.hashes]
    assert hashes == list(block_hashes(everything, 4, salt))
    assert [change.event.parent for change in stored] == [None, *(change.event.hashes[-1] for change in stored[:-1])]
