"""Tests of the mapping of requests to pools."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.routing.pools.grid import Axis, Grid, pools_to_try

NUMBERS = st.floats(0, 3_600_000)


@st.composite
def axes(draw: st.DrawFn) -> Axis:
    low = draw(NUMBERS)
    high = draw(st.floats(low, 4_000_000, exclude_min=True))
    axis = Axis(low, high, draw(st.integers(1, 64)))
    return axis if axis.step > 0 else Axis(0.0, 1.0, 3)


@pytest.mark.parametrize(
    ("axis", "value", "cell"),
    [
        (Axis(0, 32_000, 2), 0, 0),
        (Axis(0, 32_000, 2), 15_999, 0),
        (Axis(0, 32_000, 2), 16_000, 1),
        (Axis(0, 32_000, 2), 32_000, 1),
        (Axis(10, 3_000, 2), 0, 0),  # 0 is a value: the fastest
        (Axis(10, 3_000, 2), 1_504.999, 0),
        (Axis(10, 3_000, 2), 1_505, 1),
        (Axis(5, 100, 3), 68.4, 2),
        (Axis(0, 1, 10), 0.3, 2),  # 0.3 / 0.1 is 2.9999999999999996: as the formula rounds, not as a reader would
        (Axis(0.1, 0.7, 3), 0.6999999999999999, 2),
        (Axis(0, 3, 3), 1 - 2**-53, 0),
        (Axis(-1.5, -0.5, 2), -1.0, 1),
    ],
)
def test_a_value_has_the_cell_that_the_formula_gives(axis: Axis, value: float, cell: int) -> None:
    assert axis.cell(value) == cell


@given(axes(), st.one_of(NUMBERS, st.floats(-1e9, 1e9), st.integers(0, 10**40)))
def test_every_finite_value_has_the_cell_of_the_formula(axis: Axis, value: float) -> None:
    expected = max(0, min(int((value - axis.low) / axis.step), axis.resolution - 1))
    assert axis.cell(value) == expected
    assert 0 <= axis.cell(value) < axis.resolution


@given(st.integers(0, 10**7), st.one_of(st.none(), NUMBERS), axes(), axes())
def test_every_request_has_the_pool_of_its_cells(length: int, target: float | None, rows: Axis, columns: Axis) -> None:
    names = tuple(tuple(f"{row},{column}" for column in range(columns.resolution)) for row in range(rows.resolution))
    cell = columns.cell(columns.midpoint if target is None else target)
    assert Grid(rows, columns, names).pool(length, target) == f"{rows.cell(length)},{cell}"


@pytest.mark.parametrize(
    ("pool", "order"),
    [
        ("slow", ("slow", "a", "b", "fast")),
        ("a", ("a", "fast")),  # b is as fast: it is no next faster one
        ("b", ("b", "fast")),
        ("fast", ("fast",)),
    ],
)
def test_only_faster_pools_follow_the_slowest_of_them_first(pool: str, order: tuple[str, ...]) -> None:
    assert pools_to_try(pool, {"fast": 9, "a": 1, "slow": -3, "b": 1}) == order


@given(st.dictionaries(st.text(max_size=2), st.integers(-3, 3), min_size=1))
def test_priorities_never_fall_in_the_order_of_pools(priorities: dict[str, int]) -> None:
    names = list(priorities)
    for pool in names:
        order = pools_to_try(pool, priorities)
        assert order[0] == pool
        ranks = [(priorities[name], names.index(name)) for name in order[1:]]
        assert ranks == sorted(ranks)
        assert set(order[1:]) == {name for name in names if priorities[name] > priorities[pool]}
