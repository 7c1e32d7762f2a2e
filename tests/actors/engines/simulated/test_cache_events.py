"""The events of a simulated prefix cache: what a listener knows by them is what the memory has."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engines.simulated.cache_events import CacheEvents
from actors.engines.simulated.kv_memory import KvMemory, Lease
from protocol.block_hashes import block_digests, block_hash
from protocol.messages.kv_events import BlockChange, BlockEvent
from protocol.token_ids import TokenIds

STORED, REMOVED, CLEARED = BlockChange.STORED, BlockChange.REMOVED, BlockChange.CLEARED
D = block_digests(b"", TokenIds.of(range(6)).packed, 1)
H = tuple(map(block_hash, D))


def test_neighbouring_pages_of_one_prefix_are_one_event() -> None:
    events = CacheEvents()
    events.stored(D[0], None)
    events.stored(D[1], D[0])
    events.stored(D[3], D[2])
    events.removed(D[5])
    events.removed(D[4])
    events.stored(D[4], D[3])
    events.cleared()
    assert events.take() == [
        BlockEvent(STORED, 0, H[:2]),
        BlockEvent(STORED, 0, (H[3],), H[2]),
        BlockEvent(REMOVED, 0, (H[5], H[4])),
        BlockEvent(STORED, 0, (H[4],), H[3]),
        BlockEvent(CLEARED),
    ]
    assert events.take() == []


def apply(event: BlockEvent, known: set[int]) -> None:
    if event.change is STORED:
        assert not known & set(event.hashes), "a page is stored once"
        known.update(event.hashes)
    elif event.change is REMOVED:
        assert known >= set(event.hashes)
        known.difference_update(event.hashes)
    else:
        known.clear()


@given(st.randoms(use_true_random=False), st.integers(1, 80))
@settings(max_examples=200, deadline=None)
def test_the_events_tell_what_is_cached(rng: random.Random, steps: int) -> None:
    memory, leases, known = KvMemory(12), list[tuple[Lease, list[bytes]]](), set[int]()
    for _ in range(steps):
        match rng.randrange(5):
            case 0 | 1:
                tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 6))]
                digests = block_digests(b"", TokenIds.of(tokens).packed, 1)
                if (lease := memory.take(digests, len(digests))) is not None:
                    leases.append((lease, digests))
            case 2 if leases:
                lease, digests = rng.choice(leases)
                if lease.own:
                    memory.publish(lease, digests[len(lease.shared)])
            case 3 if leases:
                memory.release(leases.pop(rng.randrange(len(leases)))[0])
            case 4 if rng.random() < 0.2:
                memory.flush()
        for event in memory.events.take():
            apply(event, known)
        assert len(known) == memory.referenced + memory.idle
