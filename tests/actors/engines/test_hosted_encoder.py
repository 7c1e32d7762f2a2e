"""An encoder's host behind the port: what is refused before it is sent, and when a batch is released."""

from __future__ import annotations

from typing import Any, cast

import pytest
import trio
from attrs import define, field
from trio.testing import MockClock

from actors.engines.hosted_encoder import HostedEncoder
from protocol.errors import AskerLeft, Overloaded
from protocol.messages.engine import encoder_info
from protocol.messages.media import BATCHES_MAX, EmbeddingBatch, EncodeBatch
from tests.rig.calls import AnyAnswer
from tests.rig.encoders import MEDIA, image, new_id


@define(eq=False)
class ByHand:
    """A link whose streams a test ends by hand."""

    answers: dict[int, AnyAnswer] = field(factory=dict)
    cancelled: list[int] = field(factory=list)

    def open(self, request: EncodeBatch, credit: int) -> tuple[int, AnyAnswer]:
        stream = len(self.answers) + 1
        self.answers[stream] = AnyAnswer(credit)
        return stream, self.answers[stream]

    def cancel(self, stream: int) -> None:
        self.cancelled.append(stream)


def encoder_over(link: ByHand) -> HostedEncoder:
    return HostedEncoder(cast("Any", link), encoder_info("sglang", "1", MEDIA, 2))


def batch(number: int, items: int = 1) -> EncodeBatch:
    return EncodeBatch(new_id(number), (image(),) * items)


async def test_few_batches_wait_and_one_that_has_ended_makes_room(autojump_clock: MockClock) -> None:
    link = ByHand()
    encoder = encoder_over(link)
    for number in range(BATCHES_MAX):
        encoder.submit(batch(number))
    with pytest.raises(Overloaded, match="4 batches wait in the encoder"):
        encoder.submit(batch(9))
    link.answers[2].end(EmbeddingBatch(()))
    encoder.submit(batch(9))
    with pytest.raises(Overloaded):
        encoder.submit(batch(10))


async def test_a_batch_is_released_when_the_host_has_ended_its_stream(autojump_clock: MockClock) -> None:
    link = ByHand()
    encoder = encoder_over(link)
    encoder.submit(batch(1))
    encoder.abort(new_id(1))
    encoder.abort(new_id(7))
    assert link.cancelled == [1]
    with trio.move_on_after(5) as waiting:
        await encoder.wait_released(new_id(1))
    assert waiting.cancelled_caught, "it is still computed"
    link.answers[1].fail(AskerLeft("left"))
    await encoder.wait_released(new_id(1))
    await encoder.wait_released(new_id(1))
    encoder.abort(new_id(1))
    assert link.cancelled == [1], "it is forgotten"
