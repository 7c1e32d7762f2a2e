"""The embedders of tests keep the contract, and one that breaks a promise is found out."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock

from actors.engines.embedding.port import VectorsAnswer
from actors.engines.simulated.embedder import SimulatedEmbedder, _Request
from actors.kit.calls import Answer
from protocol.errors import BadRequest
from protocol.messages.embedding import Embed, TextItem
from protocol.messages.engine import EngineInfo, EngineLoad
from protocol.token_ids import TokenIds
from tests.contracts import embedder
from tests.rig.embedders import COSTS, EMBEDDER, SCORER, VECTORS, running_embedder, simulated_embedder

LISTED = evolve(EMBEDDER, embedding=evolve(VECTORS, matryoshka_dimensions=(2, 4)))


@pytest.mark.parametrize("info", [EMBEDDER, LISTED, SCORER])
async def test_the_embedder_of_tests_keeps_the_contract(info: EngineInfo, autojump_clock: MockClock) -> None:
    await embedder.check_embedder(lambda: running_embedder(simulated_embedder(info)))


class Forgetful(SimulatedEmbedder):
    def abort(self, request_id: str) -> None:
        pass


class Hasty(SimulatedEmbedder):
    async def wait_released(self, request_id: str) -> None:
        await trio.lowlevel.checkpoint()


class Leaky(SimulatedEmbedder):
    """Goes on counting a request that was aborted."""

    leaked = 0

    def abort(self, request_id: str) -> None:
        self.leaked += request_id in self._requests
        super().abort(request_id)

    async def load(self) -> EngineLoad:
        load = await super().load()
        return evolve(load, waiting=load.waiting + self.leaked)


class Mixing(SimulatedEmbedder):
    """Computes the first item of a request in place of each."""

    def submit(self, request: Embed) -> VectorsAnswer:
        return super().submit(evolve(request, items=request.items[:1] * len(request.items)))


class Padding(SimulatedEmbedder):
    """Pads items to the longest of their request, which changes their vectors."""

    def submit(self, request: Embed) -> VectorsAnswer:
        longest = max((len(item.tokens) for item in request.items), default=0)
        return super().submit(evolve(request, items=tuple(self._padded(item, longest) for item in request.items)))

    @staticmethod
    def _padded(item: TextItem, length: int) -> TextItem:
        return (
            evolve(item, tokens=item.tokens + TokenIds.of([0] * (length - len(item.tokens)))) if item.tokens else item
        )


class Neighbourly(SimulatedEmbedder):
    """Gives the vectors of a request that is computed to the next one."""

    def submit(self, request: Embed) -> VectorsAnswer:
        other = next(iter(self._requests.values()), None)
        mixed = request if other is None else evolve(request, items=(other.request.items * 64)[: len(request.items)])
        return super().submit(mixed)


class Uncut(SimulatedEmbedder):
    """Returns whole vectors where shorter ones are asked for."""

    def submit(self, request: Embed) -> VectorsAnswer:
        return super().submit(evolve(request, dimensions=None))


class Unnormalised(SimulatedEmbedder):
    """States that its vectors have the length 1, and returns others."""

    async def _add_vectors(self, request: _Request) -> None:
        stated = self.info
        self.info = evolve(stated, embedding=evolve(VECTORS, normalised=False))
        try:
            await super()._add_vectors(request)
        finally:
            self.info = stated


class Lax(SimulatedEmbedder):
    """Fails the requests that it cannot compute later."""

    def submit(self, request: Embed) -> VectorsAnswer:
        try:
            return super().submit(request)
        except BadRequest as error:
            answer: VectorsAnswer = Answer(0)
            answer.fail(error)
            return answer


class Ending(SimulatedEmbedder):
    """Aborts all requests with one."""

    def abort(self, request_id: str) -> None:
        for each in list(self._requests):
            super().abort(each)


@pytest.mark.parametrize(
    ("liar", "broken"),
    [
        (Forgetful, embedder.aborts_in_the_turn_of_submit),
        (Hasty, embedder.aborts_what_it_computes),
        (Leaky, embedder.aborts_in_the_turn_of_submit),
        (Mixing, embedder.computes_an_item_alike_in_any_request),
        (Padding, embedder.computes_an_item_alike_in_any_request),
        (Neighbourly, embedder.computes_an_item_alike_beside_other_requests),
        (Uncut, embedder.cuts_and_normalises_again),
        (Unnormalised, embedder.returns_vectors_of_the_stated_length),
        (Lax, embedder.refuses_an_impossible_request),
        (Ending, embedder.aborts_one_request_and_no_other),
    ],
)
async def test_an_embedder_that_breaks_a_promise_is_found_out(
    liar: type[SimulatedEmbedder],
    broken: Callable[[embedder.Subject], Awaitable[None]],
    autojump_clock: MockClock,
) -> None:
    with pytest.raises(BaseException) as caught:
        await embedder.check_embedder(lambda: running_embedder(liar(EMBEDDER, 4, random.Random(0), COSTS)))
    error: BaseException = caught.value
    while isinstance(error, BaseExceptionGroup) and not hasattr(error, "__notes__"):
        error = error.exceptions[0]
    assert error.__notes__ == [f"while checking: {broken.__name__}"]
