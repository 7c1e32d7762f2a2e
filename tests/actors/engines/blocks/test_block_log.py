"""The log of an engine's blocks: whatever a reader has missed, it ends with the blocks that there are."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engines.blocks.block_log import TAIL_EVENTS_MAX, TAIL_HASHES_MAX, BlockLog, BlockReader
from protocol.messages.kv_events import REPLY_HASHES_MAX, BlockChange, BlockEvent, BlockEvents, check_block_events

STORED, REMOVED, CLEARED = BlockChange.STORED, BlockChange.REMOVED, BlockChange.CLEARED
changes = st.lists(
    st.builds(
        BlockEvent,
        st.sampled_from([STORED, STORED, REMOVED, CLEARED]),
        st.integers(0, 1),
        st.lists(st.integers(0, 30), max_size=6).map(tuple),
    ),
    max_size=12,
)


class Copy:
    """What a reader knows of a log."""

    def __init__(self) -> None:
        self.blocks: dict[int, set[int]] = {}
        self.life, self.since = "", 0

    def apply(self, message: BlockEvents) -> None:
        check_block_events(message)
        if message.reset:
            self.blocks.clear()
        elif self.since:
            assert message.number == self.since + len(message.events), "no event is lost"
        for event in message.events:
            blocks = self.blocks.setdefault(event.rank, set())
            if event.change is CLEARED:
                blocks.clear()
            elif event.change is STORED:
                blocks.update(event.hashes)
            else:
                blocks.difference_update(event.hashes)
        self.life, self.since = message.life, message.number

    def read(self, reader: BlockReader, messages_max: int = 10**6) -> None:
        for _ in range(messages_max):
            if (message := reader.read()) is None:
                return
            self.apply(message)


def truth(log: BlockLog) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for (rank, _, _), blocks in log.blocks():
        found.setdefault(rank, set()).update(blocks)
    return found


def known(copy: Copy) -> dict[int, set[int]]:
    return {rank: blocks for rank, blocks in copy.blocks.items() if blocks}


@given(st.lists(changes, max_size=8), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_a_reader_that_comes_and_goes_ends_with_the_blocks_that_there_are(
    batches: list[list[BlockEvent]], rng: random.Random
) -> None:
    log, copy = BlockLog("life"), Copy()
    reader = BlockReader(log)
    for events in batches:
        log.apply(events)
        if rng.random() < 0.5:  # the reader is asked again from where it was
            reader = BlockReader(log, copy.life, copy.since)
        copy.read(reader, rng.randrange(4))
    copy.read(BlockReader(log, copy.life, copy.since))
    assert known(copy) == truth(log)


def test_a_reader_too_far_behind_gets_all_blocks_in_parts_and_what_changes_meanwhile() -> None:
    log, copy = BlockLog("life"), Copy()
    copy.read(BlockReader(log))
    for number in range(TAIL_EVENTS_MAX + 1):
        log.apply([BlockEvent(STORED, 0, (number,))])
    reader = BlockReader(log, copy.life, copy.since)
    first = reader.read()
    assert first is not None
    assert (first.reset, first.number) == (True, 0), "more is to come"
    copy.apply(first)
    log.apply([BlockEvent(REMOVED, 0, (0, 8000)), BlockEvent(STORED, 1, (5,))])
    copy.read(reader)
    assert known(copy) == truth(log)
    assert copy.since == log.number


def test_no_message_has_more_hashes_than_fit_a_turn() -> None:
    log = BlockLog("life")
    log.apply([BlockEvent(STORED, 0, tuple(range(5 * REPLY_HASHES_MAX)), parent=-1)])
    reader = BlockReader(log, "life", 1)
    sizes, parents = list[int](), list[int | None]()
    while (message := reader.read()) is not None:
        sizes.append(sum(len(event.hashes) for event in message.events))
        parents += [event.parent for event in message.events]
    assert sizes == [REPLY_HASHES_MAX] * 5
    assert parents == [-1, *(REPLY_HASHES_MAX * part - 1 for part in range(1, 5))]


def test_the_memory_of_a_log_does_not_grow_with_what_nobody_reads() -> None:
    log = BlockLog("life")
    for number in range(3 * TAIL_EVENTS_MAX):
        log.apply([BlockEvent(STORED, 0, (number,)), BlockEvent(REMOVED, 0, (number - 10,))])
    assert len(log) == 10
    assert len(list(log.changes(log.number - TAIL_EVENTS_MAX) or ())) == TAIL_EVENTS_MAX
    assert log.changes(log.number - TAIL_EVENTS_MAX - 1) is None
    assert log.changes(log.number + 1) is None, "of another life, or a lie"


def test_a_reader_of_very_many_blocks_is_not_overtaken_while_it_reads() -> None:
    log, copy, size = BlockLog("life"), Copy(), REPLY_HASHES_MAX
    for part in range(3 * TAIL_HASHES_MAX // size):
        log.apply([BlockEvent(STORED, 0, tuple(range(size * part, size * (part + 1))))])
    reader, resets = BlockReader(log), 0
    for part in range(2 * 3 * TAIL_HASHES_MAX // size):  # as fast as the engine replaces them
        if (message := reader.read()) is not None:
            resets += message.reset
            copy.apply(message)
        if part < 3 * TAIL_HASHES_MAX // size:
            old = tuple(range(size * part, size * (part + 1)))
            log.apply([BlockEvent(REMOVED, 0, old), BlockEvent(STORED, 0, tuple(number + 2**40 for number in old))])
    copy.read(reader)
    assert resets <= 2
    assert known(copy) == truth(log)


@pytest.mark.parametrize(("replies_max", "stored"), [(1, 1), (2, 2), (3, 3), (4, 4), (9, 4)])
def test_a_list_of_all_blocks_is_cut_to_the_replies_that_there_is_room_for(replies_max: int, stored: int) -> None:
    log = BlockLog("life")
    log.apply([BlockEvent(STORED, 0, tuple(range(2**20, 2**20 + REPLY_HASHES_MAX)), None, "CPU_PINNED")])
    log.apply([BlockEvent(STORED, 0, tuple(range(3 * REPLY_HASHES_MAX)))])
    reader = BlockReader(log)
    parts = [reader.read(replies_max) for _ in range(stored)]
    assert [part.number for part in parts if part is not None] == [*[0] * (stored - 1), log.number]
    media = [event.medium for part in parts if part is not None for event in part.events]
    assert media == ["GPU", "GPU", "GPU", "CPU_PINNED"][:stored], "those that routers need come first"
    assert reader.read(replies_max) is None
    log.apply([BlockEvent(STORED, 0, (7,))])
    assert reader.read(replies_max) is not None
