"""Token ids as one value are the list of these ids."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.token_ids import IDS_MAX, TokenIds

ids = st.lists(st.integers(0, IDS_MAX - 1), max_size=40)


@given(ids, ids, st.integers(-50, 50) | st.none(), st.integers(-50, 50) | st.none())
def test_they_behave_like_a_list(left: list[int], right: list[int], begin: int | None, end: int | None) -> None:
    value = TokenIds.of(left)

    assert value.tolist() == list(value) == left
    assert (len(value), bool(value)) == (len(left), bool(left))
    assert value[begin:end].tolist() == left[begin:end]
    assert (value + TokenIds.of(right)).tolist() == left + right
    assert TokenIds.joined([value, TokenIds.of(right), value]).tolist() == left + right + left
    assert [value[index] for index in range(len(left))] == left
    assert all(value.count(each) == left.count(each) for each in [*left, *right])
    assert [value.index(each) for each in left] == [left.index(each) for each in left]
    assert (value == TokenIds.of(right)) is (left == right)
    assert hash(value) == hash(TokenIds.of(left))


def test_an_index_outside_is_an_error() -> None:
    with pytest.raises(IndexError):
        TokenIds.of([1])[1]


def test_an_id_is_found_between_two_places() -> None:
    value = TokenIds.of([5, 6, 5, 7])
    assert (value.index(5, 1), value.index(7, 0, 4)) == (2, 3)
    for missing in ((8,), (6, 2), (7, 0, 3)):
        with pytest.raises(ValueError, match="not in array"):
            value.index(*missing)


@pytest.mark.parametrize("wrong", [-1, IDS_MAX])
def test_ids_outside_32_bits_are_refused(wrong: int) -> None:
    with pytest.raises(OverflowError):
        TokenIds.of([wrong])


def test_bytes_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="3 bytes"):
        TokenIds(b"123")


def test_a_long_prompt_is_shown_by_its_first_ids() -> None:
    assert repr(TokenIds.of([1, 2])) == "TokenIds(1, 2)"
    assert repr(TokenIds.of(range(100))).endswith("15 and 84 more)")
