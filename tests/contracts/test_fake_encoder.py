"""The encoders of tests keep the contract, and one that breaks a promise is found out."""

from __future__ import annotations

import random

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock

from actors.engines.encoding.port import BatchAnswer
from actors.engines.simulated.encoder import SimulatedEncoder
from protocol.errors import EngineRefused
from protocol.messages.engine import EngineLoad
from protocol.messages.media import EmbeddingOutcome, EncodeBatch, MediaItem, Modality
from tests.contracts.encoder import check_encoder
from tests.rig.encoders import COSTS, MEDIA, image, noting_encoder, running_encoder, video


def item(number: int, modality: Modality) -> MediaItem:
    return image(str(number)) if modality is Modality.IMAGE else video(str(number))


async def test_the_encoder_of_tests_keeps_the_contract(autojump_clock: MockClock) -> None:
    await check_encoder(lambda: running_encoder(noting_encoder()), item)


class Forgetful(SimulatedEncoder):
    def abort(self, batch_id: str) -> None:
        pass


class Hasty(SimulatedEncoder):
    async def wait_released(self, batch_id: str) -> None:
        await trio.lowlevel.checkpoint()


class Leaky(SimulatedEncoder):
    """Goes on counting an item that was aborted."""

    leaked = 0

    def abort(self, batch_id: str) -> None:
        self.leaked += batch_id in self._batches
        super().abort(batch_id)

    async def load(self) -> EngineLoad:
        load = await super().load()
        return evolve(load, waiting=load.waiting + self.leaked)


class Mixing(SimulatedEncoder):
    """Encodes the first item of a batch in place of each."""

    def submit(self, batch: EncodeBatch) -> BatchAnswer:
        first = batch.items[0] if batch.items else None
        same = [each for each in batch.items if first is not None and each.grid == first.grid]
        items = tuple(evolve(each, data=same[0].data) if each in same else each for each in batch.items)
        return super().submit(evolve(batch, items=items))


class Strict(SimulatedEncoder):
    """Fails a whole batch with one item of it."""

    async def _outcome(self, item: MediaItem) -> EmbeddingOutcome:
        outcome = await super()._outcome(item)
        if outcome.code and self._computing is not None:
            self._computing.answer.fail(EngineRefused(outcome.detail))
        return outcome


@pytest.mark.parametrize("liar", [Forgetful, Hasty, Leaky, Mixing, Strict])
async def test_an_encoder_that_breaks_a_promise_is_found_out(
    liar: type[SimulatedEncoder], autojump_clock: MockClock
) -> None:
    with pytest.raises(BaseException) as caught:
        await check_encoder(lambda: running_encoder(liar(MEDIA, 8, random.Random(0), COSTS)), item)
    error: BaseException = caught.value
    while isinstance(error, BaseExceptionGroup) and not hasattr(error, "__notes__"):
        error = error.exceptions[0]
    assert any("while checking" in note for note in getattr(error, "__notes__", ()))
