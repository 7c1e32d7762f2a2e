"""The faults of TensorRT-LLM that are reported: those of a request fail it alone, any other ends the host."""

from __future__ import annotations

import pytest
import trio
from attrs import evolve

from actors.engines.port import Engine
from protocol.errors import AskerLeft, EngineDied, EngineRefused, InternalError, RequestError
from protocol.messages.generation import Generate
from protocol.token_ids import TokenIds
from tests.contracts.engine import at_rest, complete, new_id, request, serves_on
from tests.rig.fake_tensorrt_llm.tensorrt_llm._faults import Fault, prompt_of
from tests.rig.trtllm_engines import trtllm_engine

pytestmark = pytest.mark.realtime

WITHIN_S = 10.0


def faulty(engine: Engine, fault: Fault, tokens_max: int = 8, logprobs: int | None = None) -> Generate:
    """Return a request with a fault."""
    wanted = request(engine, tokens_max)
    return evolve(wanted, id=new_id(), tokens=TokenIds.of(prompt_of(fault, 9, 8)), logprobs=logprobs)


@pytest.mark.parametrize(
    ("fault", "logprobs", "error"),
    [
        (Fault.REFUSED, None, EngineRefused),
        (Fault.REQUEST_ERROR, None, EngineRefused),
        (Fault.CANCELLED, None, InternalError),
        (Fault.TIMEOUT, None, InternalError),
        (Fault.LOGPROB_MISSING, 2, InternalError),
    ],
)
async def test_a_fault_of_a_request_fails_it_alone(
    fault: Fault, logprobs: int | None, error: type[RequestError]
) -> None:
    async with trtllm_engine() as engines:
        engine = engines.current
        assert engine is not None
        neighbour = request(engine, 64)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(complete, engine, neighbour)
            with trio.fail_after(WITHIN_S), pytest.raises(error):
                await complete(engine, faulty(engine, fault, logprobs=logprobs))
        await at_rest(engine)
        await serves_on(engine)


@pytest.mark.parametrize(("fault", "logprobs"), [(Fault.LOGPROBS_AHEAD, 2), (Fault.LOGPROBS_FLOATS, 0)])
async def test_other_forms_of_log_probabilities_are_read(fault: Fault, logprobs: int) -> None:
    async with trtllm_engine() as engines:
        engine = engines.current
        assert engine is not None
        ids, _ = await complete(engine, faulty(engine, fault, logprobs=logprobs))
        assert len(ids) == 8
        await serves_on(engine)


@pytest.mark.parametrize("fault", [Fault.FATAL, Fault.SHUT_DOWN, Fault.DEATH])
async def test_any_other_fault_ends_the_host_and_the_engine_is_lost(fault: Fault) -> None:
    with trio.fail_after(60), pytest.RaisesGroup(EngineDied, allow_unwrapped=True, flatten_subgroups=True):
        async with trtllm_engine() as engines:
            engine = engines.current
            assert engine is not None
            with pytest.raises(RequestError):
                await complete(engine, faulty(engine, fault))
            await trio.sleep_forever()


async def test_an_abort_that_is_ignored_keeps_the_slot_until_the_answer_ends() -> None:
    async with trtllm_engine() as engines:
        engine = engines.current
        assert engine is not None
        wanted = faulty(engine, Fault.ABORT_IGNORED, tokens_max=400)
        answer = engine.submit(wanted)
        await anext(answer)
        engine.abort(wanted.id)
        with trio.move_on_after(0.3) as waiting:
            await engine.wait_released(wanted.id)
        assert waiting.cancelled_caught, "the slot was believed to be free"
        assert (await engine.load()).running == 1
        with trio.fail_after(WITHIN_S):
            await engine.wait_released(wanted.id)
        with pytest.raises(AskerLeft):
            await answer.result()
        await at_rest(engine)
        await serves_on(engine)
