"""TensorRT-LLM's events of blocks, translated: the log has the blocks of the memory, under hashes of its own tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engines.blocks.block_log import BlockLog
from actors.engines.trtllm.block_events import HOST, BlockTranslator
from protocol.block_hashes import block_hashes
from protocol.messages.adapters import Adapter, adapter_salt
from protocol.messages.kv_events import GPU, BlockChange, BlockEvent
from tests.rig.fake_tensorrt_llm.tensorrt_llm._cache import Cache

PAGE = 4
PROMPT = [*range(10, 22)]  # three blocks
HASHES = block_hashes(PROMPT, PAGE)
SALTS = (None, "red")


def block(own: int, tokens: Iterable[int], **changes: Any) -> dict[str, Any]:
    found = {"type": "stored_block", "block_hash": own, "cache_level": 0, "mm_keys": [], "cache_salt": None}
    ids = [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens]
    return {**found, "tokens": ids, **changes}


def blocks(*owns: int, first: int = 0, **changes: Any) -> list[dict[str, Any]]:
    """Return blocks of the prompt from `first` on, under TensorRT-LLM's own hashes."""
    starts = range(first * PAGE, len(PROMPT), PAGE)
    return [block(own, PROMPT[start : start + PAGE], **changes) for own, start in zip(owns, starts, strict=False)]


def stored(*stored_blocks: dict[str, Any], parent: int | None = None, **changes: Any) -> dict[str, Any]:
    return {"type": "stored", "parent_hash": parent, "blocks": [*stored_blocks], **changes}


def removed(*owns: int) -> dict[str, Any]:
    return {"type": "removed", "block_hashes": [*owns]}


def translated(*data: dict[str, Any] | None, translator: BlockTranslator | None = None) -> list[BlockEvent]:
    """Return the changes by events numbered one after the other; None is an event that does not arrive."""
    found = translator or BlockTranslator(PAGE)
    events = [{"event_id": number, "window_size": 64, "data": each} for number, each in enumerate(data) if each]
    return [change for event in events for change in found.translate(event)]


def hashes(log: BlockLog) -> set[int]:
    return {each for _, known in log.blocks() for each in known}


# The whole of it -----------------------------------------------------------------------


STEPS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 17), st.sampled_from(SALTS), st.booleans(), st.booleans()), max_size=25
)


@given(STEPS, st.integers(3, 12))
def test_the_log_has_the_blocks_of_the_memory_or_fewer_after_a_gap(
    steps: list[tuple[int, int, str | None, bool, bool]], blocks_max: int
) -> None:
    """Prompts begin alike, end in partial blocks and push each other out; some events are lost on the way."""
    cache = Cache(blocks_max, PAGE, windows=(64, 8), rank=None, events_max=1000)
    translator, log, lost = BlockTranslator(PAGE), BlockLog("life"), False
    for family, length, salt, ended, loses in steps:
        cache.store([family] * 3 + [*range(length)], salt, ended=ended)
        if loses and len(cache.events) > 2:
            cache.events.popleft()
            lost = True
        while cache.events:
            log.apply(translator.translate(cache.events.popleft()))
        present = truth(cache)
        assert hashes(log) <= present
        assert lost or hashes(log) == present


def truth(cache: Cache) -> set[int]:
    """Return the project's hashes of the full blocks that a memory has."""
    full = [each for each in cache.cached.values() if len(each.prefix) % PAGE == 0]
    return {block_hashes(each.prefix, PAGE, each.salt)[-1] for each in full}


# Single events -------------------------------------------------------------------------


def test_a_run_of_blocks_has_the_hashes_of_its_tokens() -> None:
    assert translated(stored(*blocks(1, 2, 3))) == [BlockEvent(BlockChange.STORED, 0, HASHES)]
    assert translated(stored(*blocks(1)), stored(*blocks(2, 3, first=1), parent=1)) == [
        BlockEvent(BlockChange.STORED, 0, HASHES[:1]),
        BlockEvent(BlockChange.STORED, 0, HASHES[1:], HASHES[0]),
    ]


def test_removed_blocks_are_named_by_the_hashes_that_they_were_stored_under() -> None:
    found = translated(stored(*blocks(1, 2, 3)), removed(3, 2, 99))
    assert found[1:] == [BlockEvent(BlockChange.REMOVED, 0, (HASHES[2], HASHES[1]))]
    assert translated(removed(5)) == []
    again = translated(stored(*blocks(1)), removed(1), removed(1), stored(*blocks(2, first=1), parent=1))
    assert [each.change for each in again] == [BlockChange.STORED, BlockChange.REMOVED], "it is not there any more"


def test_a_salt_keeps_blocks_apart_and_is_all_that_tells_those_of_an_adapter() -> None:
    """Their hashes are those by which a router looks for a request for the adapter."""
    salted = block_hashes(PROMPT, PAGE, adapter_salt(Adapter("pirate", "d"), None))
    found = translated(stored(*blocks(1, 2, cache_salt="adapter:pirate@d")), removed(1))
    assert found == [BlockEvent(BlockChange.STORED, 0, salted[:2]), BlockEvent(BlockChange.REMOVED, 0, salted[:1])]
    assert translated(stored(*blocks(1), *blocks(2, first=1, cache_salt="red"))) == [], "blocks of two salts"


def test_a_salt_that_the_host_has_changed_is_that_of_the_request_again() -> None:
    def own_salt(salt: str | None) -> str | None:
        return salt and (salt.partition(":")[2] or None)

    translator = BlockTranslator(PAGE, own_salt=own_salt)
    for changed, own in (("1:red", "red"), ("1:", None), (None, None)):
        (found,) = translated(stored(*blocks(1, cache_salt=changed)), translator=translator)[-1:]
        assert found.hashes == block_hashes(PROMPT[:PAGE], PAGE, own)


def test_a_gap_forgets_all_blocks_and_what_follows_on_them() -> None:
    found = translated(stored(*blocks(1)), None, stored(*blocks(2, first=1), parent=1), removed(1))
    assert found == [BlockEvent(BlockChange.STORED, 0, HASHES[:1]), BlockEvent(BlockChange.CLEARED)]


def test_the_first_events_may_be_missed() -> None:
    found = translated(None, None, stored(*blocks(2, first=1), parent=1), stored(*blocks(1)))
    assert found == [BlockEvent(BlockChange.STORED, 0, HASHES[:1])]


def test_ranks_are_numbered_and_forgotten_apart() -> None:
    translator, found = BlockTranslator(PAGE, ranks=2), list[BlockEvent]()
    for rank, number in ((0, 0), (1, 7), (1, 8), (0, 5)):
        event = {"event_id": number, "attention_dp_rank": rank, "data": stored(*blocks(number))}
        found += translator.translate(event)
    assert found == [
        BlockEvent(BlockChange.STORED, 0, HASHES[:1]),
        BlockEvent(BlockChange.STORED, 1, HASHES[:1]),
        BlockEvent(BlockChange.STORED, 1, HASHES[:1]),
        BlockEvent(BlockChange.CLEARED, 0),
        BlockEvent(BlockChange.STORED, 0, HASHES[:1]),
    ]
    assert [*translator.translate({"event_id": 0, "attention_dp_rank": 2, "data": stored(*blocks(1))})] == []
    assert [*translator.forget()] == [BlockEvent(BlockChange.CLEARED, rank) for rank in (0, 1)]


def test_only_the_largest_window_counts() -> None:
    translator, found = BlockTranslator(PAGE), list[BlockEvent]()
    created = {"type": "created", "num_blocks_per_cache_level": [8, 0]}
    for number, (window, data) in enumerate(
        ((8, created), (64, created), (8, stored(*blocks(1))), (64, stored(*blocks(1))), (8, removed(1)))
    ):
        found += translator.translate({"event_id": number, "window_size": window, "data": data})
    assert found == [BlockEvent(BlockChange.STORED, 0, HASHES[:1])]


def test_blocks_of_a_smaller_window_are_forgotten_once_a_larger_one_is_known() -> None:
    translator, found = BlockTranslator(PAGE), list[BlockEvent]()
    for number, window in enumerate((8, 64)):
        found += translator.translate({"event_id": number, "window_size": window, "data": stored(*blocks(1))})
    assert [each.change for each in found] == [BlockChange.STORED, BlockChange.CLEARED, BlockChange.STORED]


@pytest.mark.parametrize(
    "other",
    [
        block(2, PROMPT[4:7]),
        block(2, PROMPT[4:9]),
        block(2, PROMPT[4:8], mm_keys=[{"type": "mm_key", "hash": "ab"}]),
        {**block(2, []), "tokens": [{"token_id": 1, "token_extra_id": 5}] * PAGE},
        {**block(2, []), "tokens": [{"token_id": -1}] * PAGE},
        {**block(2, []), "tokens": [{"token_id": "1"}] * PAGE},
        {**block(2, PROMPT[4:8]), "block_hash": None},
    ],
)
def test_a_block_that_is_not_full_or_not_of_text_alone_ends_the_run(other: dict[str, Any]) -> None:
    found = translated(stored(*blocks(1), other, *blocks(3, first=2)), removed(2, 3))
    assert found == [BlockEvent(BlockChange.STORED, 0, HASHES[:1])]


def test_a_block_that_is_moved_is_in_another_medium() -> None:
    def moved(level: int) -> dict[str, Any]:
        return {"type": "updated", "block_hash": 1, "cache_level": {"new_value": level, "old_value": 1 - level}}

    found = translated(stored(*blocks(1)), moved(1), moved(1), moved(0), {"type": "updated", "block_hash": 9})
    changes = [(each.change, each.medium) for each in found]
    assert changes == [
        (BlockChange.STORED, GPU),
        (BlockChange.REMOVED, GPU),
        (BlockChange.STORED, HOST),
        (BlockChange.REMOVED, HOST),
        (BlockChange.STORED, GPU),
    ]
    assert {each.hashes for each in found} == {HASHES[:1]}


def test_a_run_over_two_media_is_two_events() -> None:
    first, second = blocks(1, 2)
    found = translated(stored(first, {**second, "cache_level": 1}))
    assert found == [
        BlockEvent(BlockChange.STORED, 0, HASHES[:1]),
        BlockEvent(BlockChange.STORED, 0, HASHES[1:2], HASHES[0], HOST),
    ]


@pytest.mark.parametrize(
    "odd", [{}, {"event_id": 0}, {"event_id": 0, "data": {"type": "new"}}, {"data": [1], "event_id": 0}]
)
def test_an_event_of_an_unknown_form_changes_nothing(odd: dict[str, Any]) -> None:
    assert [each.change for each in BlockTranslator(PAGE).translate(odd)] == ([] if odd else [BlockChange.CLEARED])
