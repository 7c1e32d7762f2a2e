"""The similarity of texts by their vectors: the cosine of the angle between two of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot
from operator import mul

FLOATS_A_CHARACTER = 8
"""The elements of vectors that are multiplied in the time in which one character is tokenised."""


def cosines(queries: Sequence[memoryview[float]], documents: Sequence[memoryview[float]]) -> list[float]:
    """Return the cosine of each document with its query: with its own, or with the only one."""
    lengths = [(query.tolist(), length(query)) for query in queries]
    result = list[float]()
    for index, document in enumerate(documents):
        query, query_length = lengths[index if len(lengths) > 1 else 0]
        product = query_length * length(document)
        result.append(sum(map(mul, query, document)) / product if product else 0.0)
    return result


def length(vector: memoryview[float]) -> float:
    """Return the length of a vector."""
    return hypot(*vector)
