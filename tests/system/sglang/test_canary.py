"""The canary of real engines: each leg answers alone, and a scheduler that is stopped while idle is replaced by it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes.util import find_library
from itertools import count
from typing import Any

import pytest
import trio
from attrs import evolve

from actors.canary import ANSWERED, CanaryLimits, CanaryObserver, canary, canary_request
from actors.engines.port import Engine
from actors.engines.sglang.hand_off import HAND_OFF, NO_PARTNER
from actors.engines.slots.deadlines import Deadlines
from actors.engines.slots.slots import Slots
from bench.rig.clients import BackgroundReader, Chat, chat_body
from bench.rig.node import SGLANG, Node, free_port, node, short_folder, wait_until
from protocol.messages.cluster import Leg
from protocol.messages.engine import HandOff
from protocol.token_ids import TokenIds
from tests.contracts.engine import at_rest, new_id, read, request, serves_on, slot
from tests.rig.host_parts import HEAD, parts_process
from tests.system.sglang.conftest import MakeEngine

pytestmark = pytest.mark.engine

AFTER_S, WITHIN_S = 1.0, 5.0  # a busy machine delays a canary, too
STOPPING_S = 5.0  # of a host whose scheduler stands still: it is asked, and killed
START_S = 120.0  # of the next life
NOTICED_S = 30.0  # a canary takes 6, and nothing else would notice it
NOT_SILENT = "silent_s = 600.0\n"  # the pings of the node would notice it, too
KEYS = f"canary = {{ after_s = {AFTER_S}, within_s = {WITHIN_S} }}\n"
SAME_HOST = f"""
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
assert FAKE_BOOTSTRAP_HOST == {NO_PARTNER!r}
"""
needs_mooncake = pytest.mark.skipif(
    find_library("ibverbs") is None, reason="Mooncake's library needs Debian's libibverbs1"
)


class Recorder(CanaryObserver):
    """The outcomes of canaries."""

    def __init__(self, enough: int) -> None:
        self.outcomes: list[str] = []
        self.enough = enough
        self.done = trio.Event()

    def ended(self, rank: int, outcome: str, seconds: float) -> None:
        self.outcomes.append(outcome)
        if len(self.outcomes) == self.enough:
            self.done.set()


@pytest.mark.nightly
def test_a_rendezvous_without_a_partner_is_at_the_address_that_sglang_knows() -> None:
    with parts_process() as run:
        assert run({"same": HEAD + SAME_HOST})["same"].splitlines()[-1] == "done"


@pytest.mark.parametrize(
    "leg",
    [
        Leg.BOTH,
        pytest.param(Leg.PREFILL, marks=[needs_mooncake, pytest.mark.nightly]),
        pytest.param(Leg.DECODE, marks=[needs_mooncake, pytest.mark.nightly]),
    ],
)
async def test_each_leg_answers_its_canaries_alone_and_keeps_nothing_of_them(leg: Leg, make_engine: MakeEngine) -> None:
    changes: dict[str, Any] = {"bootstrap_port": free_port()} if leg is Leg.PREFILL else {}
    async with make_engine(leg=leg, slots=2, **changes) as engine:
        for _ in range(2):  # the second finds nothing of the first
            wanted = canary_request(engine.info, new_id(), new_id(), alone(engine))
            async with slot(engine, wanted) as generation:
                ids, finished = await read(generation)
            assert (len(ids), finished.usage.cached_tokens) == (wanted.sampling.tokens_max, 0)
            await at_rest(engine)
        await left_at_once(engine)
        observer = Recorder(3)
        numbers = count(1)
        slots, limits = Slots(engine, 2, Deadlines()), CanaryLimits(after_s=0.2, within_s=30.0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(canary, slots, limits, new_id, numbers.__next__, HAND_OFF, observer)
            with trio.fail_after(60):
                await observer.done.wait()
            nursery.cancel_scope.cancel()
        assert observer.outcomes == [ANSWERED] * 3
        await at_rest(engine)
        if leg is Leg.BOTH:
            await serves_on(engine)


def alone(engine: Engine) -> bytes:
    """Return the hand-off of a request to an engine without a partner, empty if it computes both legs."""
    if engine.info.hand_off is HandOff.NONE:
        return b""
    return HAND_OFF.without_partner(engine.info, rank=0, number=int(new_id(), 16) % 2**63)


async def left_at_once(engine: Engine) -> None:
    """Leave canaries after ever longer, and check that the engine keeps none."""
    for pause_s in (0.0, 0.0005, 0.001, 0.002, 0.005, 0.01):
        async with slot(engine, canary_request(engine.info, new_id(), new_id(), alone(engine))):
            await trio.sleep(pause_s)
    await at_rest(engine)


@pytest.mark.nightly
async def test_a_canary_touches_no_cached_prefix_of_others(make_engine: MakeEngine) -> None:
    async with make_engine(slots=2, page_size=1) as engine:
        [token] = canary_request(engine.info, new_id(), new_id()).tokens
        cached: list[int] = []
        for _ in range(2):
            async with slot(engine, canary_request(engine.info, new_id(), new_id())) as generation:
                await read(generation)
            async with slot(engine, evolve(request(engine, 1), tokens=TokenIds.of([token] * 4))) as generation:
                _, finished = await read(generation)
            cached.append(finished.usage.cached_tokens)
        assert cached == [0, 3], "what the same prompt has left, and nothing of a canary"


@contextmanager
def watched(*more: str) -> Iterator[Node]:
    with short_folder() as folder, node(folder, engine=SGLANG + NOT_SILENT + KEYS + "".join(more)) as running:
        yield running


def canaries(running: Node, outcome: str) -> float:
    return running.metric("espalier_canaries_total", outcome=outcome)


@pytest.mark.nightly
def test_a_scheduler_that_is_stopped_while_idle_is_found_and_replaced_within_the_canarys_time() -> None:
    with watched() as running:
        assert wait_until(lambda: canaries(running, "answered") >= 2, 30.0) is not None
        before = running.observe()["host"].pid
        assert running.metric("espalier_requests_total") == running.metric("espalier_tokens_total") == 0
        running.kill("scheduler", signal.SIGSTOP)
        noticed_s = wait_until(lambda: running.get("/ready")[0] == 503, NOTICED_S)
        assert noticed_s is not None, "it was not noticed"
        sentence = f"its canary got no whole answer within {WITHIN_S:g} s"
        body = b""

        def told() -> bool:
            nonlocal body
            status, text = running.get("/ready")
            body = text if sentence.encode() in text else body
            return status == 200

        assert wait_until(told, STOPPING_S + START_S) is not None
        assert sentence in body.decode() or sentence in running.output()
        assert running.observe()["host"].pid != before
        assert canaries(running, "late") >= 1
        answered = canaries(running, "answered")
        assert wait_until(lambda: canaries(running, "answered") > answered, 30.0) is not None, (
            "the next life is watched too"
        )
        assert "canary" in running.output()


@pytest.mark.nightly
def test_a_scheduler_that_is_stopped_while_busy_is_found_by_the_deadlines_of_its_requests() -> None:
    with watched("deadlines = { gap_s = 9.0 }\n") as running:
        chat = Chat(running.port, chat_body("Tell me a long story", 400))
        answer = BackgroundReader(chat.read)
        assert wait_until(lambda: chat.outcome.first_at, 30.0) is not None
        late = canaries(running, "late") + canaries(running, "failed")
        running.kill("scheduler", signal.SIGSTOP)
        stopped_at = time.perf_counter()
        assert not answer.wait(60.0).whole
        assert time.perf_counter() - stopped_at > AFTER_S + WITHIN_S, "no canary has come in between"
        assert wait_until(lambda: running.get("/ready")[0] == 200, STOPPING_S + START_S) is not None
        assert canaries(running, "late") + canaries(running, "failed") == late == 0
