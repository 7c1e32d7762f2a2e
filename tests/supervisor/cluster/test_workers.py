"""Workers: their counts of requests, requests that wait while an engine is down, and those of other nodes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock, wait_all_tasks_blocked

from protocol.cost import ANSWER_TOKENS_MAX
from protocol.errors import ActorLost, BadRequest, NotReady
from protocol.link.peer import Peer
from protocol.messages.cluster import Leg, NodeState, Offer, check_state
from protocol.messages.engine import EngineInfo
from protocol.messages.generation import Generate
from protocol.token_ids import TokenIds
from supervisor.cluster.directory import Directory
from supervisor.cluster.engine_service import EngineService
from supervisor.cluster.workers import RemoteWorker
from supervisor.links.link import Link
from supervisor.links.serving import Service
from tests.rig.fake_engine import generate
from tests.rig.links import serve
from tests.rig.network import sim_pair
from tests.rig.nodes import add_worker, count_tokens, linked_directory, queued_requests

INFO = EngineInfo("x", "1", 100, 64, 640, 64, 8, 1, True)
ONE = Offer("one", "oak", Leg.BOTH, 4, True, INFO)
TWO = Offer("two", "oak", Leg.BOTH, 4, True, INFO)


# Counts -----------------------------------------------------------------------------------


@asynccontextmanager
async def two_nodes() -> AsyncIterator[tuple[RemoteWorker, Directory]]:
    """A worker of node `far` as node `here` has it over a link, and the directory of its own node."""
    here, far = Directory("here"), Directory("far")
    worker = add_worker(far, "one")
    near_end, far_end = sim_pair()
    asker = Link(near_end, Peer("here", serves_max=0))
    server = Link(far_end, Peer("far", serves_max=4), {("one", Generate): cast("Service", worker)})
    async with trio.open_nursery() as nursery:
        for run in (asker.run, server.run, partial(serve, worker.inbox, partial(count_tokens, step_s=1.0))):
            nursery.start_soon(run)
        await asker.wait_ready()
        here.linked("far", asker)
        here.merge_state("far", NodeState((evolve(worker.offer, up=True, engine=INFO),)))
        (remote,) = here.records["far"].workers.values()
        yield remote, far
        nursery.cancel_scope.cancel()


async def ask(worker: RemoteWorker, tokens_max: int, credit: int | None = None) -> None:
    async with worker.ask(generate(tokens_max=tokens_max), tokens_max if credit is None else credit) as replies:
        await replies.result()


async def test_a_request_counts_while_it_runs_on_both_nodes(autojump_clock: MockClock) -> None:
    async with two_nodes() as (remote, far), trio.open_nursery() as nursery:
        for tokens_max in (2, 4, 6):
            nursery.start_soon(ask, remote, tokens_max)
        await trio.sleep(1)
        offer = far.local["one"].offer
        assert (offer.running, offer.waiting, offer.tokens) == (2, 1, 3 * 4 + 2 + 4 + 6)
        assert (remote.load.busy, far.running) == (3, 3)
        assert (remote.load.kv_tokens_max, remote.load.page_size) == (INFO.kv_tokens_max, INFO.page_size)
        with trio.fail_after(10):
            await far.wait_idle()
        assert trio.current_time() == 6
        assert far.local["one"].offer.tokens == 0
        await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("tenths", range(0, 45, 3))
async def test_leaving_at_any_moment_leaves_no_count_behind(tenths: int, autojump_clock: MockClock) -> None:
    async with two_nodes() as (remote, far):
        with trio.move_on_after(tenths / 10):
            async with trio.open_nursery() as nursery:
                for tokens_max in (1, 3, 9, 9, 9, 9):
                    nursery.start_soon(ask, remote, tokens_max)
        await trio.sleep(0.1)
        offer = far.local["one"].offer
        assert (remote.in_flight.own.requests, far.running, offer.tokens, offer.running, offer.waiting) == (
            0,
            0,
            0,
            0,
            0,
        )


async def test_requests_for_absurdly_many_tokens_leave_a_possible_load(autojump_clock: MockClock) -> None:
    async with two_nodes() as (remote, far), trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(ask, remote, 2**62, 1)
        await trio.sleep(0.5)
        assert check_state(far.state()).offers[0].tokens == 2 * (4 + ANSWER_TOKENS_MAX)
        nursery.cancel_scope.cancel()


async def test_a_request_counts_for_what_it_may_hold_where_it_is(autojump_clock: MockClock) -> None:
    directory = Directory("here")
    request = generate("r", prompt=100, tokens_max=10)
    for leg, cached, tokens in ((Leg.BOTH, 0, 110), (Leg.BOTH, 64, 110), (Leg.PREFILL, 0, 100)):
        worker = add_worker(directory, f"{leg}-{cached}")
        worker.idle_offer = evolve(worker.idle_offer, leg=leg)
        with trio.move_on_after(1), worker.engine.publish(SimpleNamespace(info=INFO)):
            async with worker.ask(evolve(request, cached_tokens=cached), 1):
                assert (worker.load.kv_tokens, worker.load.tokens) == (tokens, tokens)
                assert (worker.load.kv_tokens_max, worker.load.page_size) == (INFO.kv_tokens_max, INFO.page_size)


# Going elsewhere --------------------------------------------------------------------------


@pytest.mark.parametrize("leg", [Leg.BOTH, Leg.DECODE, Leg.PREFILL])
async def test_requests_that_wait_at_a_worker_that_is_gone_go_to_a_sibling_if_there_is_one(
    leg: Leg, autojump_clock: MockClock
) -> None:
    directory, _ = linked_directory()
    worker = add_worker(directory)
    directory.merge_state("far", NodeState((evolve(ONE, leg=leg),)))
    with worker.engine.publish(SimpleNamespace(info=INFO)):
        async with queued_requests(worker, 4) as failed:
            assert worker.inbox.waiting == (2, 2)
            worker.reroute_queued()
            await wait_all_tasks_blocked()
            has_sibling = leg is Leg.BOTH
            assert failed == [ActorLost] * 4 * has_sibling
            assert worker.inbox.waiting == ((0, 0) if has_sibling else (2, 2))
    assert worker.in_flight.requests == worker.in_flight.tokens == 0


async def test_requests_that_wait_at_an_engine_out_of_service_are_told_why(autojump_clock: MockClock) -> None:
    directory, _ = linked_directory()
    worker = add_worker(directory)
    directory.merge_state("far", NodeState((ONE,)))
    with worker.engine.publish(SimpleNamespace(info=INFO)):
        async with queued_requests(worker, 3) as failed:
            with worker.engine.out_of_service("its weights are replaced"):
                worker.reroute_queued()
                await wait_all_tasks_blocked()
            assert failed == [NotReady] * 3


async def test_requests_that_wait_for_an_engine_go_to_a_sibling_as_soon_as_there_is_one(
    autojump_clock: MockClock,
) -> None:
    directory, _ = linked_directory()
    worker = add_worker(directory)
    async with queued_requests(worker, 3) as failed:
        worker.reroute_queued()
        directory.merge_state("far", NodeState((evolve(ONE, up=False),)))
        await wait_all_tasks_blocked()
        assert (failed, worker.inbox.waiting) == ([], (2, 1))
        assert not directory.ranked("oak", Leg.BOTH)  # as a router that has looked
        directory.merge_state("far", NodeState((ONE,)))
        await wait_all_tasks_blocked()
        assert (failed, worker.inbox.waiting) == ([ActorLost] * 3, (0, 0))
    with worker.engine.publish(SimpleNamespace(info=INFO)):
        async with queued_requests(worker, 1) as failed:
            directory.merge_state("far", NodeState((ONE, TWO)))
            await wait_all_tasks_blocked()
            assert (failed, worker.inbox.waiting) == ([], (1, 0)), "its engine is there"


async def test_requests_that_wait_for_an_engine_go_to_a_sibling_of_the_same_node_that_comes_up(
    autojump_clock: MockClock,
) -> None:
    directory = Directory("here")
    one, two = add_worker(directory, "one"), add_worker(directory, "two")
    async with queued_requests(one, 2) as failed:
        directory.reroute_queued()
        await wait_all_tasks_blocked()
        assert failed == []
        with two.engine.publish(SimpleNamespace(info=INFO)):
            directory.reroute_queued()
            await wait_all_tasks_blocked()
            assert failed == [ActorLost] * 2


async def test_a_worker_whose_engine_is_down_takes_no_request_that_a_sibling_could(autojump_clock: MockClock) -> None:
    directory, _ = linked_directory()
    worker = add_worker(directory)
    async with queued_requests(worker, 1) as failed:
        assert (failed, worker.inbox.waiting) == ([], (1, 0))  # it is the only one, and worth waiting for
    directory.merge_state("far", NodeState((ONE,)))
    async with queued_requests(worker, 1) as failed:
        assert failed == [NotReady]


# Requests of another node -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "credit", "reason"),
    [
        ({"id": "a"}, 9, "32 hexadecimal digits"),
        ({"id": "A" * 32}, 9, "32 hexadecimal digits"),
        ({}, 8, "credit for 8 tokens, where 9 are asked for"),
    ],
)
async def test_a_request_of_another_node_that_could_harm_others_is_refused(
    change: dict[str, Any], credit: int, reason: str, autojump_clock: MockClock
) -> None:
    async with two_nodes() as (_, far):
        request = evolve(generate("ab" * 16, tokens_max=9), **change)
        with pytest.raises(BadRequest, match=reason):
            async with EngineService(far.local["one"]).ask(request, credit):
                pytest.fail("it may not ask")
        assert far.running == 0


async def test_an_id_is_in_use_until_its_answer_is_left(autojump_clock: MockClock) -> None:
    async with two_nodes() as (_, far):
        worker, request = EngineService(far.local["one"]), generate("ab" * 16, tokens_max=9)
        async with worker.ask(request, 9):
            with pytest.raises(BadRequest, match="is being answered already"):
                async with worker.ask(request, 9):
                    pytest.fail("it may not ask")
        async with worker.ask(request, 9):
            assert far.running == 1


# Prompts that are still to be computed -----------------------------------------------------------


async def test_prompts_of_all_nodes_are_queued_until_they_are_computed_but_for_what_is_cached() -> None:
    directory = Directory("here")
    worker = add_worker(directory, slots=8, inbox_size=8)
    wanted = evolve(generate(), tokens=TokenIds.of(range(10)), cached_tokens=4)
    async with AsyncExitStack() as asking:
        for asker, request_id in ((None, "0"), ("far", "1"), ("far", "2"), ("off", "3")):
            await asking.enter_async_context(worker.ask_for(asker, evolve(wanted, id=request_id * 32), 9))
        assert (worker.load.queued, worker.load.pending) == (24, 6)
        assert worker.load_without("far").queued == 12
        assert worker.load_without("off").queued == 18
        worker.begun("0" * 32)
        worker.computed("1" * 32)
        worker.computed("1" * 32)
        worker.computed("of nobody")
        assert (worker.load.queued, worker.load_without("far").queued) == (12, 6)
    assert worker.load.queued == 0
    assert worker.in_flight.by_node == {}
