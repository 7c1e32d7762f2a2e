"""The prompts that have not begun, and what another prompt has in common with them."""

from __future__ import annotations

from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from actors.routing.policies.kv.expected import GROUP_MAX, ExpectedPrefixes
from protocol.block_hashes import block_hashes

tokens = st.lists(st.integers(0, 1), min_size=1, max_size=12)


def common(left: list[int], right: list[int]) -> int:
    return len([*takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))])


@given(st.lists(st.tuples(st.sampled_from("abc"), tokens), max_size=8), tokens)
def test_the_most_blocks_in_common_are_found(prompts: list[tuple[str, list[int]]], other: list[int]) -> None:
    expected = ExpectedPrefixes()
    for worker, prompt in prompts:
        expected.add(worker, block_hashes(prompt, 1))

    wanted: dict[str, int] = {}
    for worker, prompt in prompts:
        if count := common(prompt, other):
            wanted[worker] = max(wanted.get(worker, 0), count)
    assert expected.blocks(block_hashes(other, 1)) == wanted


def test_a_prompt_that_has_begun_is_expected_no_more() -> None:
    expected = ExpectedPrefixes()
    first, second = expected.add("a", (1, 2)), expected.add("b", (1,))
    assert first is not None
    assert second is not None
    expected.discard(first)
    expected.discard(first)
    assert expected.blocks((1, 2)) == {"b": 1}
    expected.discard(second)
    assert len(expected) == 0
    assert expected.blocks((1, 2)) == {}


def test_only_the_latest_prompts_of_a_beginning_are_compared() -> None:
    expected = ExpectedPrefixes()
    expected.add("old", (1, 2))
    for number in range(GROUP_MAX):
        expected.add("new", (1, 10 + number))
    assert expected.blocks((1, 2)) == {"new": 1}
