"""Decode: each request has one slot, which is released however the request ends."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from attrs import evolve, frozen
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.decode import decode
from actors.engines.port import Generation
from actors.engines.simulated.engine import SimulatedEngine
from actors.engines.simulated.spec import SimulatedSpec
from actors.engines.slots.deadlines import Deadlines
from actors.engines.slots.slots import ReachPartner, Slots
from actors.kit.calls import Answer
from protocol.errors import (
    ActorLost,
    DeadlineExceeded,
    EngineDied,
    EngineLost,
    EngineRefused,
    HandOffFailed,
    InternalError,
    TooManyInternalErrors,
)
from protocol.messages.engine import EngineLoad
from protocol.messages.generation import Finished, Generate, Sampling, Started, Tokens
from protocol.token_ids import TokenIds
from tests.rig.calls import AnyAddress, priority_inbox
from tests.rig.fake_engine import Costs, FakeEngine, generate, whole
from tests.system.simulator import counting


@frozen
class Worker:
    address: AnyAddress
    engine: Any  # a FakeEngine, or what a test has made of it
    actor: trio.CancelScope

    @property
    def log(self) -> Any:
        return self.engine.log


@asynccontextmanager
async def working(
    costs: Costs | None = None,
    slots: int = 2,
    inbox_size: int = 2,
    deadlines: Deadlines | None = None,
    engine: Any = None,
    reach: ReachPartner | None = None,
) -> AsyncIterator[Worker]:
    """A decode actor over a fake engine that outlives it."""
    engine = engine or FakeEngine(costs or Costs())
    address, inbox = priority_inbox(inbox_size, lambda _: 0)
    async with trio.open_nursery() as engines:
        engines.start_soon(engine.run)
        async with trio.open_nursery() as actors:
            await actors.start(decode, inbox, [Slots(engine, slots, deadlines or Deadlines(), reach=reach)])
            yield Worker(address, engine, actors.cancel_scope)
            actors.cancel_scope.cancel()
        engines.cancel_scope.cancel()


async def ask(worker: Worker, wanted: Generate) -> tuple[list[int], Any | None]:
    async with worker.address.ask(wanted, wanted.sampling.tokens_max) as replies:
        got = [reply async for reply in replies]
        return [token for reply in got if isinstance(reply, Tokens) for token in reply.ids], await replies.result()


async def leave_after(worker: Worker, wanted: Generate, seconds: float) -> None:
    with trio.move_on_after(seconds):
        await ask(worker, wanted)


# A request's life -------------------------------------------------------------------------


async def test_an_answer_is_whole_and_its_end_means_that_the_slot_is_free(autojump_clock: MockClock) -> None:
    async with working() as worker:
        wanted = generate(tokens_max=3)
        async with worker.address.ask(wanted, 3) as replies:
            kinds = [type(reply) async for reply in replies]
        assert kinds == [Started, Tokens, Tokens, Tokens]
        assert trio.current_time() == 3
        assert await worker.engine.load() == EngineLoad(0, 0, 0)
        assert await ask(worker, generate("b")) == whole(generate("b"))


async def test_tokens_pass_without_waking_the_actor(autojump_clock: MockClock) -> None:
    async with working() as worker, worker.address.ask(generate(tokens_max=50), 50) as replies:
        await anext(replies)
        await wait_all_tasks_blocked()  # the first one wakes it, because the next deadline is another
        with counting() as steps:
            await trio.sleep(15)
        assert replies.credit <= 35
        assert "generate" not in steps.by_name


async def test_a_request_whose_prefill_cannot_be_reached_never_comes_to_the_engine(autojump_clock: MockClock) -> None:
    async def refuse() -> None:
        await trio.sleep(1)
        raise HandOffFailed("it cannot be reached")

    async with working(reach=lambda hand_off: refuse() if hand_off == b"far" else None) as worker:
        good = generate("good", tokens_max=3)
        async with trio.open_nursery() as asking:
            asking.start_soon(ask, worker, good)
            with pytest.raises(HandOffFailed, match="cannot be reached"):
                await ask(worker, evolve(generate("bad"), hand_off=b"far"))
            assert trio.current_time() == 1
        assert trio.current_time() == 3, "nothing waits for it"
        assert "submit bad" not in worker.log
        for name in "ab":  # its slot is free
            asking_again = generate(name, tokens_max=2)
            assert await ask(worker, asking_again) == whole(asking_again)


@pytest.mark.parametrize("after_s", [0.5, 1, 1.5, 2.5])
async def test_leaving_aborts_whatever_has_come_so_far(after_s: float, autojump_clock: MockClock) -> None:
    async with working(Costs(release_s=0.25)) as worker:
        await leave_after(worker, generate("a", tokens_max=50), after_s)
        await trio.sleep(0.25)
        await wait_all_tasks_blocked()
        assert worker.log == ["submit a", "abort a", "released a"]
        assert trio.current_time() == after_s + 0.25


async def test_leaving_after_the_end_aborts_nothing(autojump_clock: MockClock) -> None:
    async with working() as worker:
        async with worker.address.ask(generate("a"), 3):
            await trio.sleep(10)
        assert worker.log == ["submit a", "ended a"]


async def test_nothing_is_submitted_for_an_asker_that_left_the_inbox(autojump_clock: MockClock) -> None:
    async with working(slots=1, inbox_size=4) as worker, trio.open_nursery() as nursery:
        nursery.start_soon(ask, worker, generate("first", tokens_max=10))
        await wait_all_tasks_blocked()
        for name in ("one", "two", "three"):
            nursery.start_soon(leave_after, worker, generate(name), 5)
        await trio.sleep(6)
        assert await ask(worker, generate("last")) == whole(generate("last"))
        assert worker.log == ["submit first", "ended first", "submit last", "ended last"]
        assert trio.current_time() == 13


async def test_a_call_whose_asker_left_is_over_once_it_is_taken(autojump_clock: MockClock) -> None:
    async with working() as worker:
        for number in range(16):  # the asker leaves before or after its call is taken: tasks run in any order
            with trio.CancelScope() as leaving:
                async with worker.address.ask(generate(str(number)), 3) as replies:
                    leaving.cancel()
            await wait_all_tasks_blocked()
            assert replies.over.is_set()
            assert worker.log == []


# Limits -----------------------------------------------------------------------------------


async def test_a_call_without_a_slot_waits_in_the_inbox_and_then_for_room_in_it(autojump_clock: MockClock) -> None:
    async with working(slots=2, inbox_size=2) as worker:
        finished = []

        async def client(number: int) -> None:
            await ask(worker, generate(str(number), tokens_max=2))
            finished.append(trio.current_time())

        async with trio.open_nursery() as nursery:
            for number in range(7):
                nursery.start_soon(client, number)
            await wait_all_tasks_blocked()
            assert worker.address.inbox.waiting == (2, 3)  # type: ignore[attr-defined]
            assert await worker.engine.load() == EngineLoad(2, 0, 0)
        assert finished == [2, 2, 4, 4, 6, 6, 8]


async def test_a_slot_is_not_given_on_before_the_engine_has_released_it(autojump_clock: MockClock) -> None:
    async with working(Costs(release_s=2), slots=1) as worker:
        await leave_after(worker, generate("a", tokens_max=50), 1.5)
        await ask(worker, generate("b", tokens_max=1))
        assert worker.log == ["submit a", "abort a", "released a", "submit b", "ended b"]
        assert trio.current_time() == 4.5


# Deadlines --------------------------------------------------------------------------------

PATIENT = Deadlines(first_token_s=60, gap_s=20, total_s=600, release_s=5)


async def test_the_first_token_has_a_deadline(autojump_clock: MockClock) -> None:
    async with working(Costs(prefill_s=100), deadlines=PATIENT) as worker:
        with pytest.raises(DeadlineExceeded, match="60 s to its first token"):
            await ask(worker, generate())
        assert trio.current_time() == 60


async def test_the_next_token_has_a_deadline(autojump_clock: MockClock) -> None:
    async with working(deadlines=PATIENT) as worker:

        async def slow_down() -> None:
            await trio.sleep(2.5)
            worker.engine.costs.slow = 1000

        async with trio.open_nursery() as nursery:
            nursery.start_soon(slow_down)
            with pytest.raises(DeadlineExceeded, match="20 s from one token to the next"):
                await ask(worker, generate(tokens_max=50))
        assert trio.current_time() == 3 + 20


async def test_the_whole_answer_has_a_deadline(autojump_clock: MockClock) -> None:
    async with working(Costs(step_s=7), deadlines=Deadlines(60, 20, 30, 5)) as worker:
        with pytest.raises(DeadlineExceeded, match="30 s in all"):
            await ask(worker, generate(tokens_max=50))
        assert trio.current_time() == 30


async def test_time_in_the_inbox_does_not_count(autojump_clock: MockClock) -> None:
    async with working(slots=1, deadlines=Deadlines(2, 2, 6, 5)) as worker, trio.open_nursery() as nursery:
        nursery.start_soon(ask, worker, generate("a", tokens_max=5))
        await trio.sleep(0.5)
        assert await ask(worker, generate("b", tokens_max=5)) == whole(generate("b", tokens_max=5))
        assert trio.current_time() == 10


async def test_the_end_of_the_actor_fails_every_call_taken_or_not(autojump_clock: MockClock) -> None:
    async with working(Costs(stuck=True), slots=1, inbox_size=0) as worker:
        failures = []

        async def client(name: str) -> None:
            try:
                await ask(worker, generate(name, tokens_max=50))
            except ActorLost:
                failures.append((name, trio.current_time()))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(client, "a")
            await wait_all_tasks_blocked()
            worker.engine.costs.stuck = False
            with trio.move_on_after(8) as late:
                nursery.start_soon(client, "b")
                await trio.sleep(2)
                worker.actor.cancel()
                await trio.sleep(2)
            nursery.cancel_scope.cancel()
        assert not late.cancelled_caught
        assert failures == [("a", 2)]  # b was never taken: it waits for the next life of the actor
        assert worker.address.inbox.waiting[1] == 0  # type: ignore[attr-defined]


# Errors -----------------------------------------------------------------------------------


async def test_a_refused_request_fails_alone(autojump_clock: MockClock) -> None:
    async with working(Costs(refused=lambda name: name == "bad")) as worker:
        with pytest.raises(EngineRefused):
            await ask(worker, generate("bad"))
        assert await ask(worker, generate("good")) == whole(generate("good"))


async def test_a_lost_engine_fails_its_requests_and_ends_the_actor(autojump_clock: MockClock) -> None:
    failed = []

    async def ask_and_fail(worker: Worker) -> None:
        with pytest.raises(EngineLost):
            await ask(worker, generate())
        failed.append(trio.current_time())

    with pytest.RaisesGroup(EngineDied, flatten_subgroups=True):
        async with working() as worker, trio.open_nursery() as nursery:
            nursery.start_soon(ask_and_fail, worker)
            await trio.sleep(1.5)
            worker.engine.crash()
            await trio.sleep(1)
    assert failed == [1.5]


class Buggy(FakeEngine):
    def submit(self, request: Generate) -> Generation | Answer[Started | Tokens, Finished]:
        if request.id.startswith("bug"):
            raise KeyError(request.id)
        return super().submit(request)


async def test_bugs_fail_their_requests_and_a_rate_of_them_the_actor(autojump_clock: MockClock) -> None:
    with pytest.RaisesGroup(TooManyInternalErrors, flatten_subgroups=True):
        async with working(engine=Buggy(Costs())) as worker:
            for number in range(6):
                with pytest.raises(InternalError):
                    await ask(worker, generate(f"bug {number}"))
                assert number == 5 or await ask(worker, generate(str(number))) == whole(generate(str(number)))
            await trio.sleep_forever()
    assert trio.current_time() == 15


async def test_prompts_that_are_expected_in_the_cache_do_not_wait_for_each_other(autojump_clock: MockClock) -> None:
    engine = SimulatedEngine(SimulatedSpec(slots=32, kv_tokens_max=500_000), random.Random(0))
    prefix, begun = list(range(4096)), list[tuple[float, int]]()
    address, inbox = priority_inbox(32, lambda _: 0)

    async def ask_for(last: int, cached: int) -> None:
        since = trio.current_time()
        wanted = Generate(
            f"{last:032x}", TokenIds.of([*prefix, last]), Sampling(2, ignore_eos=True), cached_tokens=cached
        )
        async with address.ask(wanted, 2) as replies:
            async for reply in replies:
                if isinstance(reply, Started):
                    begun.append((trio.current_time() - since, reply.cached_tokens))

    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        await nursery.start(decode, inbox, [Slots(engine, 32, Deadlines())], 4096)
        await ask_for(1, 0)
        async with trio.open_nursery() as asking:
            for last in range(2, 18):
                asking.start_soon(ask_for, last, 10**9 if last == 2 else 4096)  # another node may say anything
        nursery.cancel_scope.cancel()
    assert [cached for _, cached in begun[1:]] == [4096] * 16
    times = [time for time, _ in begun[1:]]
    assert max(times) == min(times), "all are computed in one step"
