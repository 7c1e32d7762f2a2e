"""The actor of a model of vectors or scores; its answers over HTTP are tested in `test_embeddings.py` of the routes."""

from __future__ import annotations

from math import inf, nan

import pytest
import trio
from trio.testing import MockClock

from protocol.errors import BadRequest, InternalError, NotReady, Unsupported
from protocol.messages.embedding import EmbeddingInfo, EmbedTexts, ScoreTexts, TextVectors
from protocol.messages.text import Respond
from tests.rig.embedded_texts import Computing, asked_embeddings
from tests.rig.embedders import SCORES, VECTORS


async def test_vectors_come_in_the_order_of_the_texts(autojump_clock: MockClock) -> None:
    async with asked_embeddings(computing := Computing(seconds=1)) as ask:
        result = await ask(EmbedTexts("r", ("the oak", "elm"), dimensions=3, priority=2, owner="key"))
        assert isinstance(result, TextVectors)
        assert ([len(row) for row in result.rows], result.tokens) == ([3, 3], 7)
        [work] = computing.works
        assert (work.id, work.dimensions, work.priority, work.owner) == ("r", 3, 2, "key")


async def test_requests_run_at_once_up_to_a_number(autojump_clock: MockClock) -> None:
    async with (
        asked_embeddings(computing := Computing(seconds=1), requests_max=2) as ask,
        trio.open_nursery() as clients,
    ):
        for number in range(4):
            clients.start_soon(ask, EmbedTexts(f"{number}", ("oak",)))
        await trio.sleep(0.5)
        assert computing.running == 2
    assert (len(computing.works), trio.current_time()) == (4, 2.0)


async def test_an_asker_that_leaves_ends_the_parts(autojump_clock: MockClock) -> None:
    async with asked_embeddings(computing := Computing(seconds=100)) as ask:
        with trio.move_on_after(1):
            await ask(EmbedTexts("r", ("oak",) * 300))
        assert (computing.running, computing.left, trio.current_time()) == (0, 1, 1.0)


async def test_what_a_model_does_not_compute_is_refused(autojump_clock: MockClock) -> None:
    async with asked_embeddings(computing := Computing(SCORES)) as ask:
        with pytest.raises(Unsupported, match="computes no answers"):
            await ask(Respond("r"))
        with pytest.raises(Unsupported, match="no vectors"):
            await ask(EmbedTexts("r", ("oak",)))
        with pytest.raises(BadRequest, match="is 17 tokens long"):
            await ask(ScoreTexts("r", ("oak",), ("oak " * 13,)))
        assert computing.works == []


async def test_a_request_before_the_first_engine_is_ready_is_refused(autojump_clock: MockClock) -> None:
    async with asked_embeddings(Computing(), ready=False) as ask:
        with pytest.raises(NotReady):
            await ask(EmbedTexts("r", ("oak",)))


@pytest.mark.parametrize("number", [nan, inf])
@pytest.mark.parametrize("info", [VECTORS, SCORES])
async def test_a_score_that_is_no_number_fails_the_request(
    number: float, info: EmbeddingInfo, autojump_clock: MockClock
) -> None:
    async with asked_embeddings(Computing(info, number=number)) as ask:
        with pytest.raises(InternalError, match="no number"):
            await ask(ScoreTexts("r", ("oak",), ("elm",)))
