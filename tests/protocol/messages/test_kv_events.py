"""Events of KV memory: what a receiver checks before it applies any."""

from __future__ import annotations

import pytest

from protocol.errors import PeerViolation
from protocol.messages.cluster import RANKS_MAX
from protocol.messages.kv_events import HASHES_MAX, BlockChange, BlockEvent, BlockEvents, check_block_events


def stored(*hashes: int, rank: int = 0) -> BlockEvent:
    return BlockEvent(BlockChange.STORED, rank, hashes)


@pytest.mark.parametrize(
    "message",
    [
        BlockEvents("life", 7, (stored(*range(HASHES_MAX)),)),
        BlockEvents("life", 0, (), reset=True),
        BlockEvents("l" * 64, 1, (BlockEvent(BlockChange.CLEARED, RANKS_MAX - 1),)),
    ],
)
def test_possible_events_are_accepted(message: BlockEvents) -> None:
    check_block_events(message)


@pytest.mark.parametrize(
    "message",
    [
        BlockEvents("", 7, (stored(1),)),
        BlockEvents("life", -1, (stored(1),)),
        BlockEvents("life", 7, (stored(*range(HASHES_MAX)), stored(1))),
        BlockEvents("life", 7, (stored(1, rank=RANKS_MAX),)),
    ],
)
def test_impossible_events_are_refused(message: BlockEvents) -> None:
    with pytest.raises(PeerViolation):
        check_block_events(message)
