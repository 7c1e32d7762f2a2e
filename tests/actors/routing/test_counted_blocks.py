"""The prefixes that requests count on, and who looks when something of them may be gone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from attrs import asdict, define, field
from hypothesis import given
from hypothesis import strategies as st

from actors.routing.counted_blocks import FEW_LOOKS_MAX, LOOKS_MAX, CountedBlocks, CountedPrefix
from actors.routing.prefix_index import Holder

ONE, TWO = ("engine", 0), ("engine", 1)


@define(eq=False)
class Lookers:
    """Requests that count on blocks, by their turns; one that looks counts on what it `finds`, if that is less."""

    finds: dict[int, Sequence[int]] = field(factory=dict)
    blocks: CountedBlocks = field(factory=CountedBlocks)
    looked: list[int] = field(factory=list)
    prefixes: dict[int, CountedPrefix] = field(factory=dict)

    def add(self, turn: int, *numbers: int, holder: Holder = ONE) -> None:
        self.prefixes[turn] = CountedPrefix(holder, turn, partial(self._look, turn))
        self.blocks.count(self.prefixes[turn], numbers)

    def leave(self, turn: int) -> None:
        self.blocks.count(self.prefixes.pop(turn), ())

    def removed(self, *hashes: int, holder: Holder = ONE) -> Sequence[int]:
        """Return who has looked."""
        self.looked.clear()
        self.blocks.may_be_gone({holder: hashes or None})
        return [*self.looked]

    def more(self, looks_max: int = FEW_LOOKS_MAX) -> Sequence[int]:
        """Return who has looked since."""
        self.looked.clear()
        self.blocks.look(looks_max)
        return [*self.looked]

    def _look(self, turn: int) -> None:
        self.looked.append(turn)
        if turn in self.finds:
            self.blocks.count(self.prefixes[turn], self.finds[turn])


def test_when_a_block_is_gone_that_some_count_on_the_requests_look_in_their_order() -> None:
    lookers = Lookers()
    for turn, number in ((2, 7), (1, 8), (3, 9)):
        lookers.add(turn, number)
    assert lookers.removed(5, 6) == []
    assert lookers.removed(5, 7, 7) == [1, 2, 3]
    assert lookers.removed() == [1, 2, 3], "any block may be gone"
    assert lookers.more() == []


def test_who_finds_less_counts_on_what_it_has_found() -> None:
    lookers = Lookers(finds={1: (5,), 2: ()})
    for turn in (1, 2, 3):
        lookers.add(turn, 7)
    assert lookers.removed(7) == [1, 2, 3]
    assert len(lookers.blocks) == 2
    lookers.leave(3)
    assert lookers.removed(7) == []
    assert lookers.removed(5) == [1]


def test_a_block_is_gone_from_the_cache_alone_that_tells_so() -> None:
    lookers = Lookers()
    lookers.add(1, 7)
    lookers.add(2, 7, holder=TWO)
    assert lookers.removed(7, holder=TWO) == [2]
    assert lookers.removed(7, holder=("other", 0)) == []


def test_who_counts_on_nothing_any_more_does_not_look() -> None:
    lookers = Lookers()
    for turn in (1, 2):
        lookers.add(turn, 7, 8)
    first = lookers.prefixes[1]
    for _ in range(2):
        lookers.blocks.count(first, ())
    assert lookers.removed(7) == [2]
    lookers.leave(2)
    assert asdict(lookers.blocks) == asdict(CountedBlocks())


def test_few_look_at_a_time_and_the_others_after_the_next_changes() -> None:
    for hashes in ((), tuple(range(2 * LOOKS_MAX + 1))):
        lookers = Lookers()
        for turn in range(2 * LOOKS_MAX + 1):
            lookers.add(turn, turn)
        assert lookers.removed(*hashes) == [*range(LOOKS_MAX)]
        assert not lookers.blocks.is_doubted(lookers.prefixes[LOOKS_MAX - 1])
        assert lookers.blocks.is_doubted(lookers.prefixes[LOOKS_MAX])
        assert lookers.more() == [*range(LOOKS_MAX, LOOKS_MAX + FEW_LOOKS_MAX)]
        assert lookers.more(LOOKS_MAX) == [*range(LOOKS_MAX + FEW_LOOKS_MAX, 2 * LOOKS_MAX + 1)]
        assert lookers.more() == []


def test_of_several_holders_the_requests_look_by_turns() -> None:
    lookers = Lookers()
    for turn in range(2 * LOOKS_MAX):
        lookers.add(turn, 7, holder=(ONE, TWO)[turn % 2])
    lookers.blocks.doubt(ONE, None, 0)
    lookers.blocks.doubt(TWO, None, 0)
    assert lookers.more(8) == [*range(8)]
    lookers.blocks.doubt(ONE, None, 0)
    assert lookers.more(4) == [0, 9, 2, 11], "one that tells much holds up no other"


def test_a_holder_whose_requests_have_all_looked_takes_no_turn() -> None:
    lookers = Lookers()
    lookers.add(1, 7)
    lookers.add(2, 7, holder=TWO)
    lookers.blocks.doubt(ONE, None, 0)
    assert lookers.more(1) == [1]
    lookers.blocks.doubt(TWO, None, 0)
    assert lookers.more(1) == [2]


def test_those_look_from_a_turn_on_if_any_counts_on_a_block() -> None:
    lookers = Lookers()
    for turn in range(3):
        lookers.add(turn, 7)
    lookers.blocks.doubt(ONE, (5, 6), 1)
    assert lookers.more() == []
    lookers.blocks.doubt(ONE, (5, 7), 1)
    assert lookers.more() == [1, 2]


def test_those_from_a_turn_on_look() -> None:
    lookers = Lookers()
    for turn in range(5):
        lookers.add(turn, 7)
    lookers.blocks.doubt(ONE, None, 4)
    lookers.blocks.doubt(ONE, None, 3)
    lookers.blocks.doubt(ONE, None, 4)
    assert [lookers.blocks.is_doubted(lookers.prefixes[turn]) for turn in range(5)] == [False] * 3 + [True] * 2
    assert lookers.more() == [3, 4]
    assert not lookers.blocks.is_doubted(lookers.prefixes[4])


steps = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(0, 3)), max_size=60)


@given(steps)
def test_whoever_has_not_looked_is_doubted_and_nothing_is_left_of_those_who_left(
    steps: list[tuple[int, int, int]],
) -> None:
    lookers, doubted, holders = Lookers(), set[int](), dict[int, Holder]()
    for turn, (kind, number, other) in enumerate(steps):
        holder = (ONE, TWO)[other % 2]
        if kind == 0 or not lookers.prefixes:
            lookers.add(turn, number, holder=holder)
            holders[turn] = holder
            doubted |= {turn} if lookers.blocks.is_doubted(lookers.prefixes[turn]) else set()
        elif kind == 1:
            left = sorted(lookers.prefixes)[number % len(lookers.prefixes)]
            lookers.leave(left)
            doubted.discard(left)
        elif kind == 2:
            lookers.blocks.doubt(holder, None, number)
            doubted |= {each for each in lookers.prefixes if holders[each] == holder and each >= number}
        else:
            looked = lookers.more(other)
            assert doubted.issuperset(looked)
            doubted.difference_update(looked)
        assert {t for t, each in lookers.prefixes.items() if lookers.blocks.is_doubted(each)} == doubted
    assert sorted(lookers.more(1000)) == sorted(doubted)
    for left in tuple(lookers.prefixes):
        lookers.leave(left)
    assert asdict(lookers.blocks) == asdict(CountedBlocks())
