"""Cosines of vectors."""

from __future__ import annotations

from array import array

import pytest

from actors.text.similarity import cosines, length


def row(*numbers: float) -> memoryview[float]:
    return memoryview(array("f", numbers).tobytes()).cast("f")


def test_a_document_is_compared_with_its_own_query_or_the_only_one() -> None:
    x, y, both = row(2, 0), row(0, 1), row(3, 3)
    assert cosines([x], [x, y, both]) == [1.0, 0.0, pytest.approx(0.5**0.5)]
    assert cosines([x, y], [both, y]) == [pytest.approx(0.5**0.5), 1.0]


def test_a_vector_without_a_direction_is_similar_to_none() -> None:
    assert cosines([row(0, 0)], [row(1, 1)]) == [0.0]
    assert length(row(3, 4)) == 5.0
