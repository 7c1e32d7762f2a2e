"""Texts to vectors, and pairs of texts to scores: what an *embedder* computes.

An embedder computes prompts and no answers, so one request to it is a *part* of a client's: a few texts that are
computed, left and lost together. What a client sees of vectors (their dimensions, their order, their encoding) is
decided in front of embedders; an embedder knows token ids alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from attrs import evolve, frozen

from protocol.errors import PeerViolation
from protocol.messages.kind import Kind, Message
from protocol.tensors import Dtype, Tensor
from protocol.token_ids import TokenIds
from protocol.trace import Trace


class EmbeddingOutput(StrEnum):
    """The output of an embedder for one item."""

    VECTORS = "vectors"  # of one text each
    SCORES = "scores"  # one number each, of a pair of texts


class Pooling(StrEnum):
    """The way from the states of all tokens of a text to one vector."""

    LAST = "last"  # the state of the last token
    CLS = "cls"  # the state of the first token
    MEAN = "mean"  # the mean of all states
    HEAD = "head"  # a head of the model's own, as for scores


@frozen
class EmbeddingInfo:
    """The properties of what an embedder returns; `width` counts the elements of a vector, and is 1 for scores.

    A model that was trained for shorter vectors (`is_matryoshka`) can return the first `dimensions` elements of each:
    any number of them, or one of `matryoshka_dimensions` if the model lists these.
    """

    output: EmbeddingOutput
    width: int
    pooling: Pooling
    normalised: bool  # whether each vector has the length 1
    is_matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()


@frozen
class TextItem:
    """One text as token ids, or a pair of texts whose second one begins at the index `second_at`; 0: no pair."""

    tokens: TokenIds
    second_at: int = 0


@frozen
class Embed(Message):
    """Compute a vector, or a score, of each item; the result is `Vectors`, in the order of the items.

    The waiting request of the highest `priority` is next. Queues are fair between `owner`s, the names of clients' keys.
    Vectors have their first `dimensions` elements alone, and are normalised again; None: all elements.
    """

    id: str
    items: tuple[TextItem, ...]
    dimensions: int | None = None
    priority: int = 0
    owner: str = ""
    trace: Trace | None = None

    @property
    def tokens(self) -> int:
        """The tokens of all items together."""
        return sum(len(item.tokens) for item in self.items)


@frozen
class Vectors(Message):
    """The vectors of an `Embed`, as float32 of shape [items, elements]."""

    data: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The vectors as one tensor."""
        return (self.data,)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Vectors:
        """Return the message with other vectors."""
        (data,) = tensors
        return evolve(self, data=data)

    def check_tensors(self) -> None:
        """Raise `PeerViolation` for a tensor that is no list of vectors."""
        shape = self.data.shape
        if self.data.dtype is not Dtype.FLOAT32 or len(shape) != 2 or min(shape) < 1:
            raise PeerViolation(f"vectors are a {self.data.dtype} tensor of shape {shape}")


KINDS = (
    Kind(107, Embed, result=Vectors),
    Kind(108, Vectors),
)
