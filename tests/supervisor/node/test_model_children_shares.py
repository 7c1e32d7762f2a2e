"""A node with one simulated engine, in virtual time: one key asks for all it may, and another key's answer is in time."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from protocol.errors import BadRequest
from protocol.messages.text import Respond, Role, Turn
from supervisor.gateway.gateway import Gateway
from supervisor.gateway.keys.key_sources import KEYS, KeySources
from supervisor.gateway.memory import ANSWER_BYTES_FREE
from supervisor.gateway.request_record import RequestRecord
from supervisor.node.assembly import Assembly
from tests.rig.gateway import SECRET
from tests.supervisor.config.test_load import Written
from tests.supervisor.engines.test_children_ranks import running
from tests.supervisor.node.test_model_children_counts import CLUSTER

STEP_S = 0.02
PACED = f"{CLUSTER}[engine.only.simulated.costs]\nfixed_s = {STEP_S}\nper_running_s = 0.0\n"
SMALL = {"tokens_max": 5}


def want_keys(assembly: Assembly, *names: str) -> Gateway:
    """Let the gateway of a running node want one of these keys."""
    gateway = assembly.gateway
    assert gateway is not None
    gateway.keys.sources = KeySources(None, {KEYS: ",".join(f"{name}={name}-{SECRET}" for name in names)})
    gateway.keys.load()
    return gateway


async def answer(gateway: Gateway, name: str, number: int = 0, **wanted: Any) -> float:
    """Return the seconds of an answer in one piece to a key."""
    key = gateway.keys.find([(b"authorization", f"Bearer {name}-{SECRET}".encode())])
    request = Respond(f"{hash((name, number)) % 2**128:032x}", (Turn(Role.USER, "oak"),), ignore_eos=True, **wanted)
    began_at = trio.current_time()
    with gateway.memory.answers.reserving(key.name, ANSWER_BYTES_FREE) as memory:
        record = RequestRecord(request.id, "tiny", "chat", began_at, key, memory=memory)
        await gateway.answer(request, gateway.runner.served["tiny"], record, lambda _: None, lambda answered: answered)
    return trio.current_time() - began_at


async def test_the_choices_of_one_request_leave_a_slot_to_another_key(
    autojump_clock: MockClock, written: Written
) -> None:
    async with running(written, PACED) as (assembly, _), trio.open_nursery() as nursery:
        gateway = want_keys(assembly, "greedy", "bob")
        alone_s = await answer(gateway, "bob", **SMALL)
        nursery.start_soon(partial(answer, gateway, "greedy", n=16, tokens_max=1500))
        for number in range(5):
            await trio.sleep(3.3)
            beside_s = await answer(gateway, "bob", number, **SMALL)
            assert beside_s <= alone_s + STEP_S + 1e-9, "its own time plus one step"
        nursery.cancel_scope.cancel()


async def test_the_only_key_has_every_slot(autojump_clock: MockClock, written: Written) -> None:
    async with running(written, PACED) as (assembly, _):
        gateway = want_keys(assembly, "alice")
        assert await answer(gateway, "alice", n=16, tokens_max=100) < 110 * STEP_S, "all choices at the same time"
        want_keys(assembly, "alice", "bob")
        assert await answer(gateway, "alice", 1, n=16, tokens_max=100) > 190 * STEP_S, "one choice after the others"


async def test_the_largest_answer_of_one_key_leaves_memory_for_another(
    autojump_clock: MockClock, written: Written
) -> None:
    async with running(written, PACED) as (assembly, _), trio.open_nursery() as nursery:
        gateway = want_keys(assembly, "greedy", "bob")
        alone_s = await answer(gateway, "bob", **SMALL)
        asked: dict[str, Any] = {"tokens_max": 6266, "logprobs": 4}
        with pytest.raises(BadRequest, match=r"stream it, or ask for fewer tokens, or for fewer answers \(n\)"):
            await answer(gateway, "greedy", n=105, **asked)
        nursery.start_soon(partial(answer, gateway, "greedy", n=78, **asked))
        await trio.sleep(1.0)
        assert gateway.memory.answers.reserved_bytes > 190_000_000
        assert await answer(gateway, "bob", 1, **SMALL) <= alone_s + STEP_S + 1e-9
        nursery.cancel_scope.cancel()
