"""The check of a request to an embedder: what its engine cannot compute is refused before it gets there."""

from __future__ import annotations

from protocol.errors import BadRequest, ContextTooLong, Unsupported
from protocol.messages.embedding import Embed, EmbeddingInfo, EmbeddingOutput
from protocol.messages.engine import EngineInfo

ITEMS_MAX = 64
"""The most items of one request to an embedder: a client's longer list is several requests."""


def check_embed(request: Embed, info: EngineInfo) -> None:
    """Raise an error for a request that an engine cannot compute.

    `BadRequest` for no or too many items, an item without tokens, a token outside the vocabulary, or a pair where texts
    are asked for, and the reverse; `ContextTooLong` for an item that is too long; `Unsupported` for dimensions that the
    model does not have, or for an engine that is no embedder.
    """
    if (embedding := info.embedding) is None:
        raise Unsupported("this engine computes no vectors")
    if not 1 <= len(request.items) <= ITEMS_MAX:
        raise BadRequest(f"a request to an embedder has 1 to {ITEMS_MAX} items, and this one {len(request.items)}")
    for index, item in enumerate(request.items):
        length = len(item.tokens)
        if not length:
            raise BadRequest(f"item {index} has no tokens")
        if length > info.request_tokens_max:
            raise ContextTooLong(f"item {index} has {length} tokens, and the limit is {info.request_tokens_max}")
        if (largest := max(item.tokens)) >= info.vocabulary_size:
            raise BadRequest(f"item {index} has token {largest}, and the vocabulary has {info.vocabulary_size}")
        if item.second_at and not (embedding.output is EmbeddingOutput.SCORES and 0 < item.second_at < length):
            raise BadRequest(f"item {index} is a pair, and cannot be one here")
        if embedding.output is EmbeddingOutput.SCORES and not item.second_at:
            raise BadRequest(f"item {index} is no pair, and this engine computes scores of pairs")
    if request.dimensions is not None and (why := dimensions_mistake(request.dimensions, embedding)) is not None:
        raise Unsupported(why)


def dimensions_mistake(dimensions: int, embedding: EmbeddingInfo) -> str | None:
    """Return why a model has no vectors of so many dimensions; None if it has."""
    if dimensions == embedding.width:
        return None
    if not embedding.is_matryoshka:
        return f"this model has vectors of {embedding.width} dimensions, and was not trained for fewer"
    if embedding.matryoshka_dimensions:
        if dimensions in embedding.matryoshka_dimensions:
            return None
        listed = ", ".join(map(str, embedding.matryoshka_dimensions))
        return f"this model has vectors of {listed} dimensions, not of {dimensions}"
    if 1 <= dimensions <= embedding.width:
        return None
    return f"this model has vectors of 1 to {embedding.width} dimensions, not of {dimensions}"
