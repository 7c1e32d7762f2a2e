"""The real engine: aborts in every state of a request, a stopped scheduler, its first requests."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Awaitable, Callable
from functools import partial
from math import inf

import pytest
import trio
from attrs import evolve

from actors.engines.port import Engine
from bench.rig.processes import process_table
from protocol.errors import EngineDied, StartFailed
from protocol.messages.generation import Generate, Grammar, GrammarKind, Started
from protocol.token_ids import TokenIds
from supervisor.supervision.registration import Registration
from tests.contracts.engine import at_rest, complete, request, serves_on
from tests.system.sglang.conftest import STARTED_WITHIN_S, Keep, KeepEngines, MakeEngine, ZygoteProcess

pytestmark = pytest.mark.engine

ANSWER_TOKENS = 500  # of an answer that nobody leaves
FREE_SHARE = 0.1  # of the time of that answer, on this machine now; `make abort-times` has the milliseconds
ENDED_WITHIN_S = 60.0
TRIES = 3  # the best counts: this machine may be busy with other things
SLOW = json.dumps(  # takes a second or more to compile, where what it asks for does not matter
    {
        "type": "object",
        "properties": {f"p{at}": {"type": "string", "pattern": f"^[a-z{at}]{{1,9}}-{at}$"} for at in range(300)},
        "required": [f"p{at}" for at in range(300)],
    }
)


async def freed_after_s(engine: Engine, wanted: Generate, *, begun: bool = False, pause_s: float = 0.0) -> float:
    """Ask, wait, leave, and return how long the request held its slot after that; inf if it was over before."""
    generation = engine.submit(wanted)
    if begun:
        assert isinstance(await anext(generation), Started)
    await trio.sleep(pause_s)
    if generation.over.is_set():
        return inf
    left_at = time.perf_counter()
    engine.abort(wanted.id)
    with trio.fail_after(300):
        await engine.wait_released(wanted.id)
    return time.perf_counter() - left_at


async def test_a_slot_is_free_soon_after_an_abort_in_whatever_state_its_request_is(
    make_engine: MakeEngine,
) -> None:
    async with make_engine(slots=4, kv_tokens_max=1024) as engine:

        def compiled(at: int) -> Generate:
            wanted = request(engine, 400, 300)
            grammar = Grammar(GrammarKind.JSON_SCHEMA, SLOW.replace("p0", f"q{at}"))
            return evolve(wanted, sampling=evolve(wanted.sampling, grammar=grammar))

        states: dict[str, Callable[[int], Awaitable[float]]] = {
            "in the prompt": lambda _: freed_after_s(engine, request(engine, 90, 900), pause_s=0.002),
            "between two tokens": lambda _: freed_after_s(engine, request(engine, ANSWER_TOKENS), begun=True),
            "while its grammar is compiled": lambda at: freed_after_s(engine, compiled(at), pause_s=0.1),
        }
        began_at = time.perf_counter()
        await complete(engine, request(engine, ANSWER_TOKENS))
        free_within_s = FREE_SHARE * (time.perf_counter() - began_at)
        took: dict[str, float] = {}
        for name, state in states.items():
            took[name] = min([await state(at) for at in range(TRIES)])
            await at_rest(engine)
        hog = request(engine, 800, 100)  # the KV memory is full from now on
        generation = engine.submit(hog)
        assert isinstance(await anext(generation), Started)
        took["while it waits for memory"] = min(
            [await freed_after_s(engine, request(engine, 400, 500), pause_s=0.1) for _ in range(TRIES)]
        )
        took["while its grammar is compiled and memory is full"] = min(
            [await freed_after_s(engine, compiled(at + TRIES), pause_s=0.1) for at in range(TRIES)]
        )
        assert not generation.over.is_set(), "the memory was not full any more"
        engine.abort(hog.id)
        await engine.wait_released(hog.id)
        await at_rest(engine)

        assert {name for name, seconds in took.items() if seconds > free_within_s} == set(), took


def below(parents: set[int], depth: int) -> list[int]:
    """Return the process ids so far below these."""
    every, found = process_table(), parents
    for _ in range(depth):
        found = {seen.pid for seen in every if seen.parent in found}
    return sorted(found)


def wake(waiting: trio.lowlevel.ParkingLot) -> None:
    waiting.unpark_all()


HOST, SCHEDULER = 1, 2  # below a zygote
SILENT_S = 10.0
NOTICED_WITHIN_S = 60.0  # where it would else never be


async def check_stopped(
    keep: Keep,
    zygote: int,
    depth: int,
    *,
    busy: bool = False,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Start an engine, stop one of its processes, and check that it ends in time and for that reason."""
    changed = trio.lowlevel.ParkingLot()
    registration: Registration[Engine] = Registration(partial(wake, changed))
    others = set(below({zygote}, HOST))
    hosts = set[int]()

    async def stop() -> None:
        with trio.fail_after(STARTED_WITHIN_S):
            engine = await registration.wait()
        hosts.update(set(below({zygote}, HOST)) - others)
        task_status.started()
        if busy:
            generation = engine.submit(request(engine, 4000))
            await anext(generation)
        else:
            await trio.sleep(SILENT_S)
            assert registration.current is engine, "an idle engine is not silent"
        [process] = hosts if depth == HOST else below(hosts, depth - HOST)
        os.kill(process, signal.SIGSTOP)
        stopped_at = trio.current_time()
        with trio.fail_after(NOTICED_WITHIN_S):
            while registration.current is not None:
                await changed.park()
        assert trio.current_time() - stopped_at > SILENT_S / 2

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stop)
        with pytest.raises(EngineDied, match="its scheduler has neither answered nor computed for 10 s"):
            await keep(registration)
    with trio.fail_after(ENDED_WITHIN_S):  # its zygote reaps it when it is told to
        while hosts.intersection(below({zygote}, HOST)):  # noqa: ASYNC110  # processes have no event
            await trio.sleep(0.05)


@pytest.mark.nightly
async def test_a_stopped_scheduler_or_host_is_noticed_within_silent_s_and_its_engine_ends_with_the_reason(
    keep_engines: KeepEngines, zygote: ZygoteProcess
) -> None:
    async with keep_engines(SILENT_S) as keep:
        async with trio.open_nursery() as nursery:
            for depth in (SCHEDULER, HOST):
                await nursery.start(check_stopped, keep, zygote.pid, depth)
        await check_stopped(keep, zygote.pid, SCHEDULER, busy=True)


@pytest.mark.nightly
@pytest.mark.parametrize("page_size", [1, 16, 64])
async def test_what_an_engine_accepts_it_answers_whole_however_full_its_memory_becomes(
    page_size: int, make_engine: MakeEngine
) -> None:
    async with make_engine(slots=4, kv_tokens_max=1024, page_size=page_size) as engine:
        total = engine.info.request_tokens_max
        assert total >= 1024 - max(6, 2 * page_size)
        answers = {1, 2, page_size - 1, page_size, page_size + 1, 2 * page_size, total // 2, total - page_size} - {0}
        wanted = {size: request(engine, size, total - size) for size in answers}
        assert {size: len((await complete(engine, each))[0]) for size, each in wanted.items()} == {
            size: size for size in answers
        }


@pytest.mark.nightly
async def test_an_engine_has_forgotten_the_requests_that_warmed_it_and_may_be_too_small_for_long_ones(
    keep_engines: KeepEngines,
) -> None:
    async with keep_engines() as keep, trio.open_nursery() as nursery:
        registration, small = Registration[Engine](), Registration[Engine]()
        with trio.fail_after(STARTED_WITHIN_S):
            await nursery.start(keep, registration)
            await nursery.start(partial(keep, small, name="small", kv_tokens_max=64))
        assert registration.current is not None
        assert small.current is not None
        await at_rest(registration.current)
        await at_rest(small.current)
        wanted = evolve(
            request(registration.current, 4), tokens=TokenIds.of(range(64))
        )  # the engine's own began with 32 of these
        generation = registration.current.submit(wanted)
        assert await anext(generation) == Started(cached_tokens=0)
        registration.current.abort(wanted.id)
        await registration.current.wait_released(wanted.id)
        await serves_on(small.current)
        with pytest.raises(StartFailed, match="its own first request was not answered: it ended without a token"):
            await keep(Registration[Engine](), name="smaller", kv_tokens_max=32)
        nursery.cancel_scope.cancel(reason="the test has ended")
