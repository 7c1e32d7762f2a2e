"""Texts to items, and items to parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
from attrs import define, field

from actors.text.embedding_items import (
    GROUP_CHARACTERS,
    PAIR_TOKENS_MAX,
    ItemLimits,
    id_items,
    pair_items,
    parts_of,
    text_items,
)
from protocol.errors import BadRequest, ContextTooLong
from protocol.messages.embedding import Cut, ScoreTexts, TextItem
from protocol.token_ids import TokenIds
from tests.rig.embedded_texts import bert_model

MODEL = bert_model()
T = TypeVar("T")


@define(eq=False)
class Run:
    """Runs work in place, and records its sizes."""

    sizes: list[int] = field(factory=list)

    async def __call__(self, size: int, function: Callable[[], T], /) -> T:
        self.sizes.append(size)
        return function()


def limits(tokens_max: int = 16, cut: Cut | None = None) -> ItemLimits:
    return ItemLimits(tokens_max, 14, cut)


def items(*lengths: int) -> list[TextItem]:
    return [TextItem(TokenIds.of([7] * length)) for length in lengths]


def test_parts_have_as_many_items_as_fit_in_their_order() -> None:
    assert [len(part) for part in parts_of(items(*[1] * 130), 64)] == [64, 64, 2]
    assert [len(part) for part in parts_of(items(5000, 3000, 3000, 9000, 1), 64)] == [2, 1, 1, 1]
    assert parts_of((), 64) == ()


async def test_short_texts_are_tokenised_together() -> None:
    run = Run()
    found = await text_items(["the oak"] * 5000, "old ", MODEL, limits(), run, "input")
    assert {item.tokens.tolist().__len__() for item in found} == {5}
    assert len(run.sizes) == 4
    assert max(run.sizes) <= GROUP_CHARACTERS


async def test_a_refusal_costs_about_as_much_as_a_text_that_fits() -> None:
    run = Run()
    with pytest.raises(ContextTooLong, match=r"input\[1\] is more than 16 tokens long") as caught:
        await text_items(["oak", "oak " * 1_000_000], "", MODEL, limits(), run, "input")
    assert caught.value.param == "input[1]"
    assert sum(run.sizes) < 100_000
    run = Run()
    [item] = await text_items(["oak " * 1_000_000], "", MODEL, limits(cut=Cut()), run, "input")
    assert (len(item.tokens), sum(run.sizes) < 100_000) == (16, True)


async def test_token_ids_are_taken_as_they_are() -> None:
    run = Run()
    assert await id_items([(5, 6), (7,)], limits(), run, "input") == [
        TextItem(TokenIds.of([5, 6])),
        TextItem(TokenIds.of([7])),
    ]
    assert [len(item.tokens) for item in await id_items([(5,) * 20], limits(cut=Cut(4)), run, "input")] == [4]
    with pytest.raises(BadRequest, match=r"input\[1\] has a token id outside 0 to 13"):
        await id_items([(5,), (14,)], limits(), run, "input")


async def test_each_pair_has_its_query_again_up_to_a_number_of_tokens() -> None:
    tokens_max = 2**16
    request = ScoreTexts("r", ("the " * 60_000,), ("oak",) * 20)
    with pytest.raises(BadRequest, match=f"makes 1200000 tokens, and one request can have {PAIR_TOKENS_MAX}") as caught:
        await pair_items(request, MODEL, limits(tokens_max), Run())
    assert caught.value.param == "queries"
    pairs = await pair_items(ScoreTexts("r", ("the", "old"), ("oak", "elm")), MODEL, limits(), Run())
    assert [pair.tokens.tolist() for pair in pairs] == [[2, 4, 3, 5, 3], [2, 8, 3, 6, 3]]
    assert {pair.second_at for pair in pairs} == {3}
