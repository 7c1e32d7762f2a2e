"""A budget of bytes is shared first come, first served; whatever is given back goes to those who wait."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from protocol.byte_budget import ByteBudget, ByteShare


def nothing() -> None:
    pass


def test_a_share_is_taken_at_once_if_there_is_room() -> None:
    budget = ByteBudget(10)
    assert [budget.share(size, nothing).taken for size in (4, 6, 0)] == [True, True, True]
    assert (budget.taken_bytes, budget.waiting) == (10, 0)
    assert not budget.share(1, nothing).taken


def test_a_small_share_waits_behind_a_large_one() -> None:
    budget, taken = ByteBudget(10), list[str]()
    first = budget.share(6, nothing)
    budget.share(10, lambda: taken.append("large"))
    assert not budget.fits(1)
    budget.share(1, lambda: taken.append("small"))
    first.give_back()
    assert (taken, budget.taken_bytes, budget.waiting) == (["large"], 10, 1)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10), st.integers(0, 8)), max_size=40))
def test_whatever_happens_the_budget_is_kept_and_turns_are_in_order(steps: list[tuple[int, int]]) -> None:
    budget, shares, order = ByteBudget(10), list[ByteShare](), list[int]()
    for size, place in steps:
        number = len(shares)
        shares.append(budget.share(size, lambda number=number: order.append(number)))  # type: ignore[misc]
        if shares[-1].taken:
            order.append(number)
        if place < len(shares):
            shares[place].give_back()
        live = [share for share in shares if share.taken and not share.over]
        assert budget.taken_bytes == sum(share.size for share in live) <= 10
        assert budget.waiting == sum(not share.taken and not share.over for share in shares)
    assert order == sorted(order)
    for share in shares:
        share.give_back()
    assert (budget.taken_bytes, budget.waiting) == (0, 0)
