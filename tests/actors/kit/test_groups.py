"""Exception groups: the same leaves, however deep they are nested."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.kit.groups import consists_of, first_leaf, first_of, leaves, raise_part
from protocol.errors import EngineLost, LinkLost, RequestError
from tests.rig.watched_memory import Watched, uncollected

errors = st.sampled_from([KeyError, LinkLost, EngineLost]).map(lambda kind: kind("a detail"))
nested = st.recursive(
    errors, lambda inner: st.lists(inner, min_size=1, max_size=3).map(lambda parts: ExceptionGroup("some", parts))
)


def flat(error: Exception) -> list[Any]:
    return [leaf for part in error.exceptions for leaf in flat(part)] if isinstance(error, ExceptionGroup) else [error]


@given(nested)
def test_the_leaves_come_in_order_from_any_depth(error: ExceptionGroup | KeyError | EngineLost | LinkLost) -> None:
    assert list(leaves(error)) == flat(error)
    assert first_leaf(error) is flat(error)[0]


@given(nested)
def test_the_first_of_a_kind_is_found_and_one_of_another_kind_is_noticed(error: ExceptionGroup | KeyError) -> None:
    kinds = [leaf for leaf in flat(error) if isinstance(leaf, RequestError)]
    assert first_of(error, RequestError) is (kinds[0] if kinds else None)
    assert consists_of(error, RequestError) == (len(kinds) == len(flat(error)))
    assert consists_of(error, RequestError, KeyError)


def test_a_part_that_is_raised_keeps_nothing_of_what_its_frames_held() -> None:
    alive: WeakSet[Watched] = WeakSet()

    def fails() -> None:
        held = Watched(b"pixels")
        alive.add(held)
        raise ExceptionGroup("some", [LinkLost("gone"), EngineLost("dead")])

    def raises_first() -> None:
        try:
            fails()
        except ExceptionGroup as group:
            raise_part(first_leaf(group))

    with uncollected():
        with pytest.raises(LinkLost) as caught:
            raises_first()
        assert caught.value.__context__ is None
        del caught
        assert len(alive) == 0
