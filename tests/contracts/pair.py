"""The contract of a prefill and a decode of one kind, checked on the pair that is given: concurrent or sequential.

Both are asked as a router asks them: with the same rendezvous, or the decode with the state that the prefill returned.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import count

import pytest
import trio
from attrs import evolve, frozen

from actors.canary import canary_request
from actors.engines.port import Engine, Generation
from actors.kit.hand_off import KindHandOff
from protocol.errors import HandOffFailed
from protocol.messages.generation import HAND_OFF_BYTES_MAX, Finished, FinishReason, Generate, Started, Tokens
from tests.contracts.engine import ANSWERED_WITHIN_S, at_rest, new_id, request, slot

_numbers = count(1)


@frozen
class Pair:
    """A prefill and a decode, an engine that computes both legs as they do, and the hand-off of their kind."""

    prefill: Engine
    decode: Engine
    whole: Engine
    hand_off: KindHandOff

    @property
    def engines(self) -> tuple[Engine, Engine]:
        """Both legs."""
        return self.prefill, self.decode

    @property
    def is_sequential(self) -> bool:
        """Whether the prefill returns states."""
        return self.prefill.info.returns_states


MakePair = Callable[[], AbstractAsyncContextManager[Pair]]


async def check_pair(make_pair: MakePair) -> None:
    """Check every item of the contract, each on a new pair."""
    for check in CHECKS:
        async with make_pair() as pair:
            try:
                await check(pair)
            except BaseException as error:
                error.add_note(f"while checking: {check.__name__}")
                raise
            for engine in pair.engines:
                await at_rest(engine)


@asynccontextmanager
async def both(pair: Pair, wanted: Generate) -> AsyncIterator[Generation]:
    """Ask both legs, as a router does, and return the answer of the decode; leaving leaves both."""
    if pair.is_sequential:
        async with (
            slot(pair.prefill, wanted) as prompt,
            slot(pair.decode, evolve(wanted, hand_off=await state_of(prompt))) as answer,
        ):
            yield answer
        return
    assert pair.hand_off.rendezvous is not None
    met = evolve(wanted, hand_off=pair.hand_off.rendezvous(pair.prefill.info, rank=0, number=next(_numbers)))
    async with slot(pair.prefill, met), slot(pair.decode, met) as answer:
        yield answer


async def state_of(prompt: Generation) -> bytes:
    """Wait for the state of a prompt."""
    with trio.fail_after(ANSWERED_WITHIN_S):
        async for reply in prompt:
            assert isinstance(reply, Started), "a sequential prefill gives no tokens"
            assert 0 < len(reply.hand_off) <= HAND_OFF_BYTES_MAX
            return reply.hand_off
    raise AssertionError("a prefill ended without a state")


async def read(generation: Generation) -> tuple[list[int], Finished]:
    """Return the ids of an answer and its end."""
    with trio.fail_after(ANSWERED_WITHIN_S):
        ids = [token async for reply in generation if isinstance(reply, Tokens) for token in reply.ids]
        finished = await generation.result()
    assert isinstance(finished, Finished)
    return ids, finished


# The contract -----------------------------------------------------------------------------


async def gives_the_tokens_of_one_engine(pair: Pair) -> None:
    for prompt in (1, 5, 40):
        wanted = request(pair.whole, 6, prompt)
        async with slot(pair.whole, wanted) as answer:
            expected, _ = await read(answer)
        async with both(pair, wanted) as answer:
            ids, finished = await read(answer)
        assert (ids, finished.reason) == (expected, FinishReason.LENGTH)


async def frees_both_legs_whenever_they_are_left(pair: Pair) -> None:
    for pause_s in (0.0, 0.001, 0.01, 0.02, 0.03, 0.05, 0.1):
        with trio.move_on_after(pause_s):
            async with both(pair, request(pair.whole, 64, 20)) as answer:
                await read(answer)
        for engine in pair.engines:
            await at_rest(engine)
    await gives_the_tokens_of_one_engine(pair)


async def answers_each_leg_alone(pair: Pair) -> None:
    for engine in pair.engines:
        alone = pair.hand_off.without_partner(engine.info, rank=0, number=next(_numbers))
        wanted = canary_request(engine.info, new_id(), new_id(), alone)
        async with slot(engine, wanted) as answer:
            if engine.info.returns_states:
                await state_of(answer)
            else:
                ids, _ = await read(answer)
                assert len(ids) == wanted.sampling.tokens_max
        await at_rest(engine)


async def refuses_a_hand_off_that_is_none_by_name_and_serves_on(pair: Pair) -> None:
    for engine in pair.engines:
        for hand_off in (b"?", bytes(HAND_OFF_BYTES_MAX + 1), *([] if engine.info.returns_states else [b""])):
            with pytest.raises(HandOffFailed):
                engine.submit(evolve(request(engine), hand_off=hand_off))
    with pytest.raises(HandOffFailed):
        pair.whole.submit(evolve(request(pair.whole), hand_off=b"?"))
    await gives_the_tokens_of_one_engine(pair)


async def gives_a_state_to_one_decode_alone(pair: Pair) -> None:
    if not pair.is_sequential:
        return
    wanted = request(pair.whole, 6, 20)
    async with slot(pair.prefill, wanted) as prompt:
        state = await state_of(prompt)
        with pytest.raises(HandOffFailed):
            pair.decode.submit(evolve(request(pair.decode, 6, 20), hand_off=state))
        async with slot(pair.decode, evolve(wanted, hand_off=state)) as answer:
            with pytest.raises(HandOffFailed):
                pair.decode.submit(evolve(wanted, id=new_id(), hand_off=state))
            assert len((await read(answer))[0]) == 6


async def frees_a_state_whose_prefill_is_left(pair: Pair) -> None:
    if not pair.is_sequential:
        return
    wanted = request(pair.whole, 6, 20)
    async with slot(pair.prefill, wanted) as prompt:
        state = await state_of(prompt)
        assert (await pair.prefill.load()).running == 1, "nothing is held for the decode"
    await at_rest(pair.prefill)
    with pytest.raises(HandOffFailed), trio.fail_after(ANSWERED_WITHIN_S):  # by `submit`, or by the answer
        async with slot(pair.decode, evolve(wanted, hand_off=state)) as answer:
            await answer.result()


async def fails_a_decode_whose_prefill_is_left_before_it_has_begun(pair: Pair) -> None:
    if not pair.is_sequential:
        return
    wanted = request(pair.whole, 6, 20)
    async with slot(pair.prefill, wanted) as prompt:
        answer = pair.decode.submit(evolve(wanted, hand_off=await state_of(prompt)))
    with pytest.raises(HandOffFailed), trio.fail_after(ANSWERED_WITHIN_S):
        await answer.result()


CHECKS: tuple[Callable[[Pair], Awaitable[None]], ...] = (
    gives_the_tokens_of_one_engine,
    frees_both_legs_whenever_they_are_left,
    answers_each_leg_alone,
    refuses_a_hand_off_that_is_none_by_name_and_serves_on,
    gives_a_state_to_one_decode_alone,
    frees_a_state_whose_prefill_is_left,
    fails_a_decode_whose_prefill_is_left_before_it_has_begun,
)
