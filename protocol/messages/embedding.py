"""Texts to vectors, and pairs of texts to scores: what an *embedder* computes.

An embedder computes prompts and no answers, so one request to it is a *part* of a client's: a few texts that are
computed, left and lost together. What a client sees of vectors (their dimensions, their order, their encoding) is
decided in front of embedders; an embedder knows token ids alone. A client's whole request is `EmbedTexts` or
`ScoreTexts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from attrs import Factory, evolve, frozen

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

    @property
    def rows(self) -> tuple[memoryview[float], ...]:
        """Each of the vectors."""
        count, width = self.data.shape
        floats = self.data.data.cast("f")
        return tuple([floats[index * width : (index + 1) * width] for index in range(count)])

    def with_tensors(self, tensors: Sequence[Tensor]) -> Vectors:
        """Return the message with other vectors."""
        (data,) = tensors
        return evolve(self, data=data)

    def check_tensors(self) -> None:
        """Raise `PeerViolation` for a tensor that is no list of vectors."""
        shape = self.data.shape
        if self.data.dtype is not Dtype.FLOAT32 or len(shape) != 2 or min(shape) < 1:
            raise PeerViolation(f"vectors are a {self.data.dtype} tensor of shape {shape}")


@frozen
class Cut:
    """The cutting of texts that are too long: their ends are left out.

    A text, with the tokens around it, has at most `tokens_max` tokens, and the second text of a pair by itself at most
    `second_max`; None: as many as the model takes.
    """

    tokens_max: int | None = None
    second_max: int | None = None


@frozen
class EmbedTexts(Message):
    """Compute a vector of each of `texts`, or of each of `token_lists`; the result is `TextVectors`.

    `prompt` names what stands before each text: a prompt of the model's own, or `query` or `document`, which are empty
    for a model without such prompts. Without a `cut` a text that is too long is refused. `params` maps fields to their
    names in the client's dialect, for the `param` of errors.
    """

    id: str
    texts: tuple[str, ...] = ()
    token_lists: tuple[tuple[int, ...], ...] = ()
    prompt: str | None = None
    dimensions: int | None = None
    cut: Cut | None = None
    priority: int | None = None  # None: the default of the client's key
    params: dict[str, str] = Factory(dict)
    trace: Trace | None = None
    owner: str = ""  # the name of the client's key

    @property
    def count(self) -> int:
        """The number of texts."""
        return len(self.texts) or len(self.token_lists)


@frozen
class ScoreTexts(Message):
    """Compute a score of each of `documents` with its query; the result is `TextScores`.

    There is one query for all documents, or one for each. With `as_search` a model of vectors puts its prompts for
    queries and for documents before them. The other fields are those of `EmbedTexts`.
    """

    id: str
    queries: tuple[str, ...]
    documents: tuple[str, ...]
    as_search: bool = False
    cut: Cut | None = None
    priority: int | None = None
    params: dict[str, str] = Factory(dict)
    trace: Trace | None = None
    owner: str = ""

    @property
    def count(self) -> int:
        """The number of scores."""
        return len(self.documents)


@frozen
class TextVectors(Message):
    """The vectors of all texts in their order, in parts, and the tokens of all texts together."""

    parts: tuple[Vectors, ...]
    tokens: int

    @property
    def rows(self) -> tuple[memoryview[float], ...]:
        """The vector of each text."""
        return tuple(row for part in self.parts for row in part.rows)


@frozen
class TextScores(Message):
    """The score of each document in their order, and the tokens of all texts together."""

    scores: tuple[float, ...]
    tokens: int


# The requests about texts have no rows: they are asked only within their own node.
KINDS = (
    Kind(107, Embed, result=Vectors),
    Kind(108, Vectors),
)
