"""SGLang behind the embedder port: what is refused before it is sent, and when a request is released."""

from __future__ import annotations

from typing import Any, cast

import pytest
import trio
from attrs import define, evolve, field
from trio.testing import MockClock

from actors.engines.sglang.boot_message import PARTS_WAITING_MAX
from actors.engines.sglang.embedder import SglangEmbedder
from protocol.errors import AskerLeft, BadRequest, Overloaded
from protocol.messages.embedding import Embed, TextItem, Vectors
from protocol.tensors import NO_TENSOR
from protocol.token_ids import TokenIds
from tests.rig.calls import AnyAnswer
from tests.rig.embedders import EMBEDDER

INFO = evolve(EMBEDDER, running_max=2)


@define(eq=False)
class ByHand:
    """A link whose streams a test ends by hand."""

    answers: dict[int, AnyAnswer] = field(factory=dict)
    cancelled: list[int] = field(factory=list)

    def open(self, request: Embed, credit: int) -> tuple[int, AnyAnswer]:
        stream = len(self.answers) + 1
        self.answers[stream] = AnyAnswer(credit)
        return stream, self.answers[stream]

    def cancel(self, stream: int) -> None:
        self.cancelled.append(stream)


def embedder_over(link: ByHand) -> SglangEmbedder:
    return SglangEmbedder(cast("Any", link), INFO)


def request(number: int, *ids: int) -> Embed:
    return Embed(f"{number:032x}", (TextItem(TokenIds.of(ids or (1,))),))


async def test_few_requests_wait_and_one_that_has_ended_makes_room(autojump_clock: MockClock) -> None:
    link = ByHand()
    embedder = embedder_over(link)
    for number in range(2 + PARTS_WAITING_MAX):
        embedder.submit(request(number))
    with pytest.raises(Overloaded, match="6 requests wait in the engine or are computed"):
        embedder.submit(request(9))
    link.answers[2].end(Vectors(NO_TENSOR))
    embedder.submit(request(9))
    with pytest.raises(Overloaded):
        embedder.submit(request(10))


async def test_a_request_is_released_when_the_host_has_ended_its_stream(autojump_clock: MockClock) -> None:
    link = ByHand()
    embedder = embedder_over(link)
    embedder.submit(request(1))
    embedder.abort(request(1).id)
    embedder.abort(request(2).id)
    assert link.cancelled == [1]
    with trio.move_on_after(1):
        await embedder.wait_released(request(1).id)
        pytest.fail("it was not released")
    link.answers[1].fail(AskerLeft("the asker left"))
    await embedder.wait_released(request(1).id)
    await embedder.wait_released(request(1).id)


async def test_a_request_that_would_end_the_scheduler_is_not_sent(autojump_clock: MockClock) -> None:
    link = ByHand()
    with pytest.raises(BadRequest, match="the vocabulary has"):
        embedder_over(link).submit(request(1, INFO.vocabulary_size))
    assert not link.answers
