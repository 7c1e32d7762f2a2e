"""Requests that an embedder cannot compute are refused, with the number of the item."""

from __future__ import annotations

import pytest
from attrs import evolve

from actors.engines.embedding.embed_check import ITEMS_MAX, check_embed, dimensions_mistake
from protocol.errors import BadRequest, ContextTooLong, RequestError, Unsupported
from protocol.messages.embedding import Embed, EmbeddingInfo, EmbeddingOutput, Pooling, TextItem
from protocol.messages.engine import EngineInfo
from protocol.token_ids import TokenIds

VECTORS = EmbeddingInfo(EmbeddingOutput.VECTORS, 8, Pooling.MEAN, normalised=True)
SCORES = EmbeddingInfo(EmbeddingOutput.SCORES, 1, Pooling.HEAD, normalised=False)
EMBEDDER = EngineInfo("any", "1", 100, 64, 128, 6, 4, 16, honours_seed=False, embedding=VECTORS)
SCORER = evolve(EMBEDDER, embedding=SCORES)
CUT = evolve(VECTORS, is_matryoshka=True)
LISTED = evolve(CUT, matryoshka_dimensions=(2, 4))


def text(*ids: int, second_at: int = 0) -> TextItem:
    return TextItem(TokenIds.of(ids), second_at)


@pytest.mark.parametrize(
    ("items", "info"),
    [
        ((text(1, 99),), EMBEDDER),
        ((text(*range(6)),) * ITEMS_MAX, EMBEDDER),
        ((text(1, 2, 3, second_at=1),), SCORER),
    ],
)
def test_a_request_that_fits_is_accepted(items: tuple[TextItem, ...], info: EngineInfo) -> None:
    check_embed(Embed("a", items), info)


@pytest.mark.parametrize(
    ("items", "info", "error", "words"),
    [
        ((text(1),), evolve(EMBEDDER, embedding=None), Unsupported, "computes no vectors"),
        ((), EMBEDDER, BadRequest, "1 to 64 items"),
        ((text(1),) * (ITEMS_MAX + 1), EMBEDDER, BadRequest, "this one 65"),
        ((text(1), text()), EMBEDDER, BadRequest, "item 1 has no tokens"),
        ((text(*range(7)),), EMBEDDER, ContextTooLong, "item 0 has 7 tokens, and the limit is 6"),
        ((text(1), text(100)), EMBEDDER, BadRequest, "item 1 has token 100"),
        ((text(1, 2, second_at=1),), EMBEDDER, BadRequest, "item 0 is a pair"),
        ((text(1, 2),), SCORER, BadRequest, "item 0 is no pair"),
        ((text(1, 2, second_at=2),), SCORER, BadRequest, "item 0 is a pair, and cannot be one"),
    ],
)
def test_a_request_that_cannot_be_computed_is_refused(
    items: tuple[TextItem, ...], info: EngineInfo, error: type[RequestError], words: str
) -> None:
    with pytest.raises(error, match=words):
        check_embed(Embed("a", items), info)


@pytest.mark.parametrize(
    ("embedding", "possible", "refused"),
    [(VECTORS, [8], [1, 7, 9]), (CUT, [1, 7, 8], [0, 9]), (LISTED, [2, 4, 8], [1, 3, 9])],
)
def test_dimensions_are_those_that_the_model_was_trained_for(
    embedding: EmbeddingInfo, possible: list[int], refused: list[int]
) -> None:
    assert [dimensions_mistake(number, embedding) for number in possible] == [None] * len(possible)
    for number in refused:
        with pytest.raises(Unsupported, match=r"8 dimensions|of 2, 4 dimensions"):
            check_embed(Embed("a", (text(1),), number), evolve(EMBEDDER, embedding=embedding))
