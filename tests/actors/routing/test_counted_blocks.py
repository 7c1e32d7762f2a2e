"""The blocks that requests on their way count on, and who looks when they were removed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from attrs import define, field

from actors.routing.counted_blocks import LOOKS_MAX, CountedBlock, CountedBlocks
from actors.routing.prefix_index import Holder

ONE, TWO = ("engine", 0), ("engine", 1)


@define(eq=False)
class Lookers:
    """Requests that count on blocks, by their names; those that find less count on them no more."""

    finds_less: bool = True
    blocks: CountedBlocks = field(factory=CountedBlocks)
    looked: list[str] = field(factory=list)
    counted: dict[str, CountedBlock] = field(factory=dict)

    def add(self, name: str, number: int, turn: int, holder: Holder = ONE) -> None:
        self.counted[name] = CountedBlock(holder, number, turn, partial(self._look, name))
        self.blocks.add(self.counted[name])

    def remove(self, *hashes: int, holder: Holder = ONE) -> Sequence[str]:
        """Return who has looked."""
        self.looked.clear()
        self.blocks.removed(holder, hashes or None)
        return [*self.looked]

    def _look(self, name: str) -> None:
        self.looked.append(name)
        if self.finds_less:
            self.blocks.discard(self.counted[name])


def test_of_those_that_count_on_a_block_the_first_looks() -> None:
    lookers = Lookers()
    for name, turn in (("second", 2), ("first", 1)):
        lookers.add(name, 7, turn)
    assert lookers.remove(5, 7, 7) == ["first"], "it computes the block again, before the turn of the other"
    assert lookers.remove(7) == ["second"]
    assert lookers.remove(7) == []
    assert len(lookers.blocks) == 0


def test_if_the_first_finds_as_much_so_do_the_others() -> None:
    lookers = Lookers(finds_less=False)
    for turn in range(3):
        lookers.add(f"{turn}", 7, turn)
    assert lookers.remove(7) == ["0"]
    assert len(lookers.blocks) == 3


def test_a_block_is_gone_from_the_cache_alone_that_tells_so() -> None:
    lookers = Lookers()
    for name, holder in (("one", ONE), ("two", TWO)):
        lookers.add(name, 7, 1, holder)
    assert lookers.remove(7, holder=TWO) == ["two"]


def test_of_a_cache_that_is_empty_every_block_is_gone() -> None:
    lookers = Lookers()
    for turn, (name, number) in enumerate((("a", 7), ("b", 8), ("c", 7))):
        lookers.add(name, number, turn)
    assert lookers.remove() == ["a", "b"]


def test_of_one_message_a_limited_number_of_requests_look() -> None:
    for hashes in ((), tuple(range(2 * LOOKS_MAX))):
        lookers = Lookers()
        for number in range(2 * LOOKS_MAX):
            lookers.add(f"{number}", number, number)
        assert lookers.remove(*hashes) == [f"{number}" for number in range(LOOKS_MAX)]


def test_who_counts_on_a_block_no_more_does_not_look() -> None:
    lookers = Lookers()
    for turn, name in enumerate(("first", "second")):
        lookers.add(name, 7, turn)
    for _ in range(2):
        lookers.blocks.discard(lookers.counted["first"])
    assert lookers.remove(7) == ["second"]
    lookers.blocks.discard(lookers.counted["second"])
    assert len(lookers.blocks) == 0
