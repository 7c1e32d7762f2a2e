"""An engine gets another role while requests run, and what it is refused, on the assembled engines of a node."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock

from actors.engines.simulated.engine import SimulatedEngine
from protocol.errors import BadRequest, NotReady, Overloaded, RequestError, StartFailed
from protocol.messages.cluster import Leg
from protocol.messages.engine import Done
from protocol.messages.kind import Message
from protocol.messages.leaving import RunningRequests
from protocol.messages.memory import ReleaseMemory
from protocol.messages.role import SetRole
from protocol.messages.text import Respond, Role, Turn
from supervisor.cluster import operations
from supervisor.engines.kinds import read_cluster
from supervisor.gateway.request_record import RequestRecord
from supervisor.node.assembly import Assembly
from supervisor.supervision.supervise import supervise
from tests.rig.assembly import built_assembly
from tests.rig.cluster_files import MODEL
from tests.rig.nodes import until
from tests.rig.pools import PAIRS
from tests.supervisor.config.test_load import Written

ENGINE = """
[engine.{name}]
model = "tiny"
kind = "simulated"
leg = "{leg}"
slots = 4
kv_tokens_max = 65_536
simulated.costs.fixed_s = 0.02
"""
FILE = f"[gateway]\nport = 0\n{MODEL}" + "".join(
    ENGINE.format(name=name, leg=leg) for name, leg in (("p", "prefill"), ("d", "decode"), ("x", "decode"))
)
LONE = f"[gateway]\nport = 0\n{MODEL}" + ENGINE.format(name="x", leg="both")


@asynccontextmanager
async def running(written: Written, text: str = FILE) -> AsyncIterator[Assembly]:
    """Run the children of a node but its gateway, whose events reach the registrations."""
    assembly, _ = built_assembly(read_cluster(written(text)), "main")
    gateway, *others = assembly.tree.children
    children = tuple(evolve(child, needs=tuple({*(child.needs or ())} - {gateway.name})) for child in others)
    run = partial(supervise, evolve(assembly.tree, children=children), on_event=assembly.on_event)
    async with trio.open_nursery() as nursery:
        await nursery.start(lambda task_status: run(rng=random.Random(0), task_status=task_status))
        yield assembly
        nursery.cancel_scope.cancel()


async def answer(assembly: Assembly, number: int, tokens_max: int = 20) -> str:
    """Return the text of a whole answer to a client."""
    assert assembly.gateway is not None
    turns = (Turn(Role.USER, f"oak {number % 7}"),)
    request = Respond(f"{number << 16:032x}", turns, tokens_max=tokens_max, ignore_eos=True, temperature=0.0)
    record = RequestRecord(request.id, "tiny", "chat", trio.current_time())
    texts = list[str]()

    def take(reply: object) -> None:
        texts.append(getattr(reply, "text", ""))

    served = assembly.gateway.runner.served["tiny"]
    await assembly.gateway.answer(request, served, record, take, lambda answered: answered)
    return "".join(texts)


async def operate(assembly: Assembly, name: str, request: Message) -> Message:
    """Have an engine carry out an operation; raises its error."""
    outcome = (await operations.operate(assembly.directory, request, name))[f"main/{name}"]
    if isinstance(outcome, RequestError):
        raise outcome
    return outcome


def leg(assembly: Assembly, name: str) -> tuple[Leg, bool]:
    """Return the leg that an engine offers, and whether it is up."""
    offer = assembly.directory.local[name].offer
    return offer.leg, offer.up


async def test_an_engine_takes_another_role_and_comes_back_and_no_request_is_lost(
    written: Written, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(written) as assembly:
        wanted = {number: await answer(assembly, number) for number in range(7)}
        answered, ends = dict[int, str](), False

        async def client(first: int) -> None:
            number = first
            while not ends:
                answered[number] = await answer(assembly, number)
                number += 100

        async with trio.open_nursery() as clients:
            for number in range(1, 13):
                clients.start_soon(client, number)
            for role in (Leg.PREFILL, Leg.BOTH, Leg.DECODE):
                await trio.sleep(2)
                assert await operate(assembly, "x", SetRole(role=role)) == Done()
                assert leg(assembly, "x") == (role, True)
                before = len(answered)
                await trio.sleep(2)
                await until(lambda: assembly.directory.local["x"].in_flight.requests)  # routers choose it
                assert len(answered) > before
            ends = True
        assert len(answered) > 100
        assert answered == {number: wanted[number % 7] for number in answered}
        assert assembly.status.last_error("main/x/decode") == "its role becomes decode"
    assert not caplog.records, "what an operator wants is no warning"


@pytest.mark.parametrize("running_requests", [RunningRequests.DRAIN, RunningRequests.END])
async def test_running_requests_end_first_or_go_on_elsewhere(
    written: Written, autojump_clock: MockClock, running_requests: RunningRequests
) -> None:
    async with running(written) as assembly, trio.open_nursery() as clients:
        texts = dict[int, str]()

        async def ask(number: int) -> None:
            texts[number] = await answer(assembly, number, tokens_max=200)

        for number in range(1, 5):
            clients.start_soon(ask, number)
        await trio.sleep(1)
        assert assembly.directory.local["x"].in_flight.requests == 2
        began = trio.current_time()
        await operate(assembly, "x", SetRole(role=Leg.PREFILL, running=running_requests))
        took = trio.current_time() - began
        assert took < 1 if running_requests is RunningRequests.END else took > 2
    assert len(texts) == 4
    assert all(texts.values())


async def test_requests_that_do_not_end_keep_the_engine_in_its_role(
    written: Written, autojump_clock: MockClock
) -> None:
    async with running(written) as assembly, trio.open_nursery() as clients:
        for number in range(1, 5):
            clients.start_soon(answer, assembly, number, 500)
        await trio.sleep(1)
        with pytest.raises(Overloaded, match="2 requests had not ended after 1 s, so nothing was done"):
            await operate(assembly, "x", SetRole(role=Leg.PREFILL, within_s=1.0))
        assert leg(assembly, "x") == (Leg.DECODE, True)
        clients.cancel_scope.cancel()


@pytest.mark.parametrize("reason", ["its device is full", "it was not ready in time"])
async def test_an_engine_that_does_not_start_with_its_new_role_goes_back_to_the_old_one(
    written: Written, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    run = SimulatedEngine.run

    async def fail(self: SimulatedEngine, **more: Any) -> None:
        if self.spec.leg is not Leg.PREFILL:
            await run(self, **more)
        elif "time" in reason:
            await trio.sleep_forever()
        raise StartFailed(reason)

    async with running(written) as assembly:
        monkeypatch.setattr(SimulatedEngine, "run", fail)
        why = f"it did not start as prefill: {reason}; it starts again as decode"
        with pytest.raises(NotReady, match=why):
            await operate(assembly, "x", SetRole(role=Leg.PREFILL))
        await assembly.engines["x"].wait()
        assert leg(assembly, "x") == (Leg.DECODE, True)
        assert await answer(assembly, 1)
        assert await operate(assembly, "x", SetRole(role=Leg.BOTH)) == Done()


async def test_the_asker_may_leave_and_the_role_changes_all_the_same(
    written: Written, autojump_clock: MockClock
) -> None:
    async with running(written) as assembly, trio.open_nursery() as clients:
        for number in range(1, 5):
            clients.start_soon(answer, assembly, number, 100)
        await trio.sleep(1)
        with trio.move_on_after(0.1) as left:
            await operate(assembly, "x", SetRole(role=Leg.BOTH))
        assert left.cancelled_caught
        assert leg(assembly, "x") == (Leg.DECODE, False)
        with pytest.raises(Overloaded, match="set-role runs"):
            await operate(assembly, "x", SetRole(role=Leg.PREFILL))
        await until(lambda: leg(assembly, "x") == (Leg.BOTH, True))


PREFILL, DECODE, BOTH = (SetRole(role=role) for role in (Leg.PREFILL, Leg.DECODE, Leg.BOTH))
UNSERVED = "no engine in service would be left for {} of its model"


@pytest.mark.parametrize(
    ("name", "request_", "text", "why"),
    [
        ("x", SetRole(role=Leg.ENCODE), FILE, "an engine that computes tokens cannot become an encoder"),
        ("x", DECODE, FILE, "its role is decode already"),
        ("x", SetRole(role=Leg.PREFILL, running=RunningRequests.HOLD), FILE, "holds no requests: drain or end them"),
        ("x", PREFILL, FILE.replace('"x"', '"x"') + 'admission = "memory"\n', "engine.x.admission: must not be"),
        ("p", DECODE, FILE, UNSERVED.format("prompts")),
        ("x", PREFILL, LONE, UNSERVED.format("answers")),
        ("x", DECODE, LONE, UNSERVED.format("prompts")),
        ("p0", DECODE, PAIRS, "tiny has pools, which name the engines of each role"),
    ],
)
async def test_a_role_that_cannot_be_is_refused_by_name_and_nothing_changes(
    written: Written, autojump_clock: MockClock, name: str, request_: SetRole, text: str, why: str
) -> None:
    async with running(written, text) as assembly:
        before = assembly.engines[name].live
        with pytest.raises(BadRequest, match=why) as caught:
            await operate(assembly, name, request_)
        assert caught.value.param == ("running" if "hold" in why else "role")
        assert assembly.engines[name].live is before
        assert assembly.engines[name].in_service


async def test_an_engine_without_its_memory_keeps_its_role(written: Written, autojump_clock: MockClock) -> None:
    async with running(written) as assembly:
        await operate(assembly, "x", ReleaseMemory())
        with pytest.raises(BadRequest, match="set-role needs memory that is released"):
            await operate(assembly, "x", PREFILL)
        assert leg(assembly, "x") == (Leg.DECODE, False)


KV = f'[gateway]\nport = 0\n{MODEL}policy = "kv"\n' + "".join(
    ENGINE.format(name=name, leg="both") + "data_parallel = 2\n" for name in ("x", "y")
)


async def test_ranks_and_prefix_caches_follow_a_role_there_and_back(
    written: Written, autojump_clock: MockClock
) -> None:
    async with running(written, KV) as assembly:
        wanted = {number: await answer(assembly, number) for number in range(7)}
        for role in (Leg.DECODE, Leg.PREFILL, Leg.BOTH):
            assert await operate(assembly, "x", SetRole(role=role)) == Done()
            offers = [assembly.directory.local[f"x#{rank}"].offer for rank in range(2)]
            assert [(offer.leg, offer.up, offer.pending_prefill_tokens_max > 0) for offer in offers] == [
                (role, True, role is not Leg.DECODE)
            ] * 2
            await trio.sleep(1)
            assert {number: await answer(assembly, number) for number in range(7)} == wanted
        async with trio.open_nursery() as clients:
            for number in range(40):
                clients.start_soon(answer, assembly, 100 + number)
            await trio.sleep(0.2)
            assert all(assembly.directory.local[f"x#{rank}"].in_flight.requests for rank in range(2))
