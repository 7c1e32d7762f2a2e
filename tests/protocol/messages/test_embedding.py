"""Requests to embedders and their vectors cross links unchanged, and vectors of another form are a violation."""

from __future__ import annotations

import pytest

from protocol.errors import PeerViolation
from protocol.link import codec
from protocol.messages.embedding import Embed, TextItem, Vectors
from protocol.tensors import Dtype, Tensor
from protocol.token_ids import TokenIds


def vectors(*shape: int, dtype: Dtype = Dtype.FLOAT32) -> Vectors:
    size = 4
    for number in shape:
        size *= number
    return Vectors(Tensor(dtype, shape, memoryview(bytes(size))))


@pytest.mark.parametrize(
    "message",
    [
        Embed("a", (TextItem(TokenIds.of([1, 2])), TextItem(TokenIds.of([1, 2, 3]), 2)), 4, 1, "alice"),
        vectors(2, 3),
    ],
)
def test_a_message_is_the_same_after_it_has_crossed_a_link(message: Embed | Vectors) -> None:
    attached = b"".join(codec.attached(message))
    assert codec.decode(codec.encode(message), memoryview(attached)) == message


@pytest.mark.parametrize("message", [vectors(2), vectors(1, 2, 3), vectors(2, 3, dtype=Dtype.INT32)])
def test_a_tensor_that_is_no_list_of_vectors_is_a_violation(message: Vectors) -> None:
    with pytest.raises(PeerViolation, match="vectors are a"):
        message.check_tensors()


def test_a_request_counts_the_tokens_of_all_items() -> None:
    assert Embed("a", (TextItem(TokenIds.of([1, 2])), TextItem(TokenIds.of([3])))).tokens == 3
