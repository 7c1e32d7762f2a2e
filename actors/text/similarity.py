"""The similarity of texts by their vectors: the cosine of the angle between two of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from math import hypot
from operator import mul

FLOATS_A_CHARACTER = 8
"""The elements of vectors that are multiplied in the time in which one character is tokenised."""


def cosines(queries: Sequence[memoryview[float]], documents: Sequence[memoryview[float]]) -> list[float]:
    """Return the cosine of each document with its query: with its own, or with the only one."""
    known = [(query.tolist(), length(query)) for query in islice(queries, 1 if len(queries) == 1 else None)]
    result = list[float]()
    for index, document in enumerate(documents):
        query, query_length = known[index if len(known) > 1 else 0]
        lengths = query_length * length(document)
        result.append(sum(map(mul, query, document)) / lengths if lengths else 0.0)
    return result


def length(vector: memoryview[float]) -> float:
    """Return the length of a vector."""
    return hypot(*vector)
