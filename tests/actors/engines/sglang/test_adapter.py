"""SGLang's adapter: a state is for one decode of its prompt, and no scores of a prompt come with a state."""

from __future__ import annotations

from typing import Any, cast

import pytest
from attrs import define, evolve, field

from actors.engines.sglang.adapter import SglangEngine
from actors.engines.sglang.hand_off import address, rendezvous, state
from protocol.errors import HandOffFailed, Unsupported
from protocol.messages.engine import EngineInfo, HandOff
from protocol.messages.generation import Generate, Sampling
from protocol.token_ids import TokenIds
from tests.rig.calls import AnyAnswer

DECODE = EngineInfo("sglang", "1", 100, 64, 128, 60, 4, 16, honours_seed=True, hand_off=HandOff.SEQUENTIAL)
PREFILL = evolve(DECODE, hand_off_address=address("::1", 8998))
WANTED = Generate("first", TokenIds.of([1, 2, 3]), Sampling(4))


@define(eq=False)
class Link:
    """A link whose streams end at once when they are cancelled."""

    answers: list[AnyAnswer] = field(factory=list)

    def open(self, _: Generate, credit: int) -> tuple[int, AnyAnswer]:
        self.answers.append(AnyAnswer(credit))
        return len(self.answers) - 1, self.answers[-1]

    def cancel(self, stream: int) -> None:
        self.answers[stream].end(None)


def engine(info: EngineInfo) -> SglangEngine:
    return SglangEngine(cast("Any", Link()), info)


async def test_a_state_in_use_is_taken_by_no_second_decode_and_a_released_one_is_forgotten() -> None:
    decode, first, other = engine(DECODE), (state(PREFILL, WANTED, number=1)), state(PREFILL, WANTED, number=2)
    decode.submit(evolve(WANTED, hand_off=first))
    with pytest.raises(HandOffFailed, match="used by another decode"):
        decode.submit(evolve(WANTED, id="second", hand_off=first))
    decode.submit(evolve(WANTED, id="third", hand_off=other))
    decode.abort("first")
    await decode.wait_released("first")
    assert decode.unreleased == 1
    decode.submit(evolve(WANTED, id="fourth", hand_off=first))


def test_an_engine_refuses_what_it_would_wait_for_in_vain() -> None:
    with pytest.raises(HandOffFailed, match="no state of this prompt"):
        engine(DECODE).submit(evolve(WANTED, hand_off=rendezvous(PREFILL, rank=0, number=1)))
    with pytest.raises(HandOffFailed):
        engine(PREFILL).submit(evolve(WANTED, hand_off=state(PREFILL, WANTED, number=1)))


def test_a_prefill_that_returns_states_refuses_the_log_probabilities_of_a_prompt_by_name() -> None:
    with pytest.raises(Unsupported) as raised:
        engine(PREFILL).submit(evolve(WANTED, logprobs=1, prompt_logprobs=True))
    assert raised.value.param == "echo"
