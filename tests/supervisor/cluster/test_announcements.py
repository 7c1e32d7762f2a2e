"""Announcements between nodes: to each what concerns it, loads as differences, and none of its own requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.kit.offload import run_inline
from protocol.errors import LinkLost
from protocol.link.peer import Peer
from protocol.messages.cluster import InFlightCounts, Leg, LoadUpdate, NodeState, Offer, check_loads, check_state
from protocol.messages.generation import Finished, FinishReason, Generate, Grammar, GrammarKind, Started, Usage
from protocol.messages.kind import Message
from protocol.messages.operations import GrammarChecked
from supervisor.cluster.announcements import Announcer, state_for
from supervisor.cluster.directory import Directory
from supervisor.cluster.engine_service import EngineService
from supervisor.cluster.link_settings import LinkSettings
from supervisor.cluster.model_pool import ModelPool
from supervisor.cluster.workers import LocalWorker, RemoteWorker
from supervisor.engines.engine_grammars import EngineGrammars
from supervisor.engines.grammar_checks import check_grammar
from supervisor.links.link import Link
from supervisor.links.serving import Service, Services
from tests.rig.calls import AnyAnswer, AnyCall
from tests.rig.fake_engine import generate
from tests.rig.links import idle_link, serve
from tests.rig.nodes import Engine, add_worker
from tests.system.cluster_blocks import STEPS
from tests.system.cluster_cost import measured
from tests.system.simulator import sim_pair

ANNOUNCE_S = 0.1
SLOTS = 8


def a_node(name: str, *, routes: bool = False, workers: int = 1) -> Directory:
    directory = Directory(name, routes=routes)
    for number in range(workers):
        add_worker(directory, f"w{number}", slots=SLOTS, inbox_size=64)
    return directory


async def run_worker(worker: LocalWorker, step_s: float) -> None:
    """Answer each request of a worker after a time."""

    async def answer(_: AnyCall, answer: AnyAnswer) -> None:
        answer.put(Started(), 0)
        await trio.sleep(step_s)
        answer.end(Finished(FinishReason.STOP, Usage(1, 1)))

    with worker.engine.publish(Engine()):
        await serve(worker.inbox, answer)


@asynccontextmanager
async def joined(front: Directory, back: Directory, step_s: float = 0.1) -> AsyncIterator[list[Message]]:
    """Two nodes with one link, which announce themselves as nodes do; yields what the first received."""
    near, far = sim_pair()
    received: list[Message] = []

    def merge(directory: Directory, node: str, message: Message) -> None:
        if directory is front:
            received.append(message)
        if isinstance(message, LoadUpdate):
            directory.merge_loads(node, check_loads(message))
        else:
            assert isinstance(message, NodeState)
            directory.merge_state(node, check_state(message))

    services: Services = {
        (name, Generate): cast("Service", EngineService(here).for_node(front.name)) for name, here in back.local.items()
    }
    ends = (
        (front, back.name, Link(near, Peer(front.name, serves_max=0))),
        (back, front.name, Link(far, Peer(back.name, serves_max=64), services)),
    )
    async with trio.open_nursery() as nursery:
        for here in back.local.values():
            nursery.start_soon(run_worker, here, step_s)
        for directory, other, link in ends:
            link.on_announcement = partial(merge, directory, other)
            nursery.start_soon(link.run)
        for directory, other, link in ends:
            await link.wait_ready()
            directory.linked(other, link)
            announcer = Announcer(directory)
            announcer.add(other, link)
            nursery.start_soon(announcer.run, lambda: ANNOUNCE_S)
        await trio.sleep(1)
        yield received
        nursery.cancel_scope.cancel()


def request(number: int) -> Generate:
    return generate(f"{number:032x}", tokens_max=1)


async def asking(front: Directory, clients: int, until: float) -> int:
    """Let clients ask one request after the other while a worker has room; return how many were answered."""
    done = 0
    numbers = iter(range(10**6))
    pool = ModelPool(front, "oak")

    async def client() -> None:
        nonlocal done
        while trio.current_time() < until:
            while not (free := [worker for worker in pool.workers() if not worker.load.full]):
                await pool.wait_changed()
            async with free[0].ask(request(next(numbers)), 1) as answer:
                await answer.result()
            done += 1

    async with trio.open_nursery() as nursery:
        for _ in range(clients):
            nursery.start_soon(client)
    return done


@pytest.mark.parametrize(("step_s", "a_second"), [(0.1, 80), (0.02, 400)])
async def test_a_freed_slot_of_a_remote_worker_is_free_at_once(
    step_s: float, a_second: int, autojump_clock: MockClock
) -> None:
    front, back = a_node("front", routes=True, workers=0), a_node("back")
    async with joined(front, back, step_s) as received:
        received.clear()
        done = await asking(front, 32, trio.current_time() + 4)
        assert done >= 4 * a_second
        assert received == []  # of its own requests a router knows best


async def test_the_requests_of_others_are_announced(autojump_clock: MockClock) -> None:
    front, back = a_node("front", routes=True, workers=0), a_node("back")
    async with joined(front, back, 1.0) as received:
        received.clear()
        (worker,) = front.workers("oak")
        async with back.local["w0"].ask(request(1), 1), worker.ask(request(2), 1):
            await trio.sleep(0.3)
            assert (worker.load.busy, back.local["w0"].load.busy) == (2, 2)
            assert [message.loads for message in received] == [(InFlightCounts("w0", 1, worker.offer.tokens, 4),)]  # type: ignore[attr-defined]
        await trio.sleep(0.3)
        assert (worker.load.busy, worker.load.tokens) == (0, 0)


async def test_prompts_that_ended_while_a_state_was_announced_are_queued_no_more(autojump_clock: MockClock) -> None:
    front, back = a_node("front", routes=True, workers=0), a_node("back")
    async with joined(front, back, 1.0):
        (worker,) = front.workers("oak")
        async with back.local["w0"].ask(request(1), 1):
            await trio.sleep(0.3)
            assert worker.load.queued > 0
            assert worker.load.pending == 0
        add_worker(back, "w1", slots=SLOTS, inbox_size=64)
        back.notify()  # the state is announced, and the load with it
        await trio.sleep(5)
        assert worker.load.queued == 0
        async with back.local["w0"].ask(request(2), 1):
            add_worker(back, "w2", slots=SLOTS, inbox_size=64)
            back.notify()
            await trio.sleep(0.3)
            assert worker.load.queued > 0


async def test_a_load_has_the_kv_memory_that_requests_may_come_to(autojump_clock: MockClock) -> None:
    front, back = a_node("front", routes=True, workers=0), a_node("back")
    async with joined(front, back, 1.0):
        (worker,) = front.workers("oak")
        asked = generate("a" * 32, prompt=7, tokens_max=5)
        async with worker.ask(asked, 5):
            await wait_all_tasks_blocked()
            assert worker.load.kv_tokens == len(asked.tokens) + 5 == back.local["w0"].load.kv_tokens


async def test_a_node_that_does_not_route_gets_no_loads_and_no_nodes_but_those_that_do(
    autojump_clock: MockClock,
) -> None:
    front, back = a_node("front", routes=True, workers=2), a_node("back")
    front.address = "h:1"
    for number in range(50):
        front.linked(f"other-{number}", idle_link())
    async with joined(front, back):
        state = state_for(front, "back")
        assert (state.offers, [neighbour.name for neighbour in state.neighbours]) == ((), ["front"])
        assert back.records["front"].workers == {}


async def test_a_node_that_joins_at_a_worker_is_found_by_nodes_that_route(autojump_clock: MockClock) -> None:
    far, one, front = a_node("far"), a_node("one"), a_node("front", routes=True)
    far.address, one.address = "10.0.0.3:7401", "10.0.0.2:7401"
    for own, other in ((far, one), (one, far), (one, front)):
        own.linked(other.name, Link(sim_pair()[0], Peer(own.name, serves_max=0)))
    one.merge_state("far", state_for(far, "one"))
    one.merge_state("front", state_for(front, "one"))
    front.merge_state("one", state_for(one, "front"))
    assert dict(front.addresses())["far"] == "10.0.0.3:7401"


async def test_a_request_wakes_no_task_that_waits_for_nodes_or_links(autojump_clock: MockClock) -> None:
    front, back = a_node("front", routes=True, workers=0), a_node("back")
    async with joined(front, back):
        versions = front.version, back.version
        async with trio.open_nursery() as nursery:
            nursery.start_soon(front.wait_changed)
            await asking(front, 1, trio.current_time() + 1)
            assert (front.version, back.version) == versions
            nursery.cancel_scope.cancel()


async def test_workers_are_ranked_as_their_loads_change(autojump_clock: MockClock) -> None:
    front, back = a_node("front", routes=True, workers=0), a_node("back", workers=3)
    async with joined(front, back):

        def order() -> list[Any]:
            return [worker.offer.name for worker in front.ranked("oak", Leg.BOTH)]

        assert order() == ["w0", "w1", "w2"]
        first, second, _ = front.ranked("oak", Leg.BOTH)
        async with first.ask(request(1), 1), second.ask(request(2), 1), second.ask(request(3), 1):
            assert order() == ["w2", "w0", "w1"]
        assert order() == ["w0", "w1", "w2"]
        front.merge_loads("back", LoadUpdate((InFlightCounts("w0", 3, 9),)))
        assert order() == ["w1", "w2", "w0"]


async def test_the_place_of_a_grammar_check_is_chosen_without_reading_every_worker(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    front, back = a_node("front", routes=True, workers=0), a_node("back", workers=100)
    async with joined(front, back):
        grammar = Grammar(GrammarKind.REGEX, "a*")
        asked: list[str] = []

        async def answers(worker: RemoteWorker, request: object) -> GrammarChecked:
            asked.append(worker.offer.name)
            if worker.offer.name == asked[0] and len(asked) > 3:
                raise LinkLost("it is gone")
            await trio.lowlevel.checkpoint()
            return GrammarChecked()

        monkeypatch.setattr(RemoteWorker, "call", answers)
        check_one = partial(check_grammar, front, EngineGrammars(run_inline), "oak")
        await check_one(grammar, "")
        monkeypatch.setattr(Directory, "all_workers", lambda _: pytest.fail("every worker is looked at"))
        await check_one(grammar, "")
        assert asked == asked[:1] * 2, "the same grammar is checked in the same place"
        for number in range(200):
            await check_one(Grammar(GrammarKind.REGEX, f"a{number}"), "")
        assert len(set(asked)) > 60
        asked[3:] = []
        await check_one(grammar, "")
        assert len(asked) == 5
        assert asked[4] != asked[3] == asked[0]


async def test_a_worker_that_is_down_learns_whether_another_can_do_its_work(autojump_clock: MockClock) -> None:
    front, back = a_node("front", routes=True, workers=0), a_node("back", workers=2)
    async with joined(front, back):
        here = back.local["w0"]
        assert state_for(front, "back").elsewhere == ()
        here.engine.withdraw()
        back.local["w1"].engine.withdraw()
        await trio.sleep(0.5)
        assert not back.has_sibling(here)
        front.linked("third", idle_link())
        front.merge_state("third", NodeState((Offer("w9", "oak", Leg.BOTH, 1, up=True),)))
        await trio.sleep(0.5)
        assert back.has_sibling(here)


async def test_announcements_of_many_workers_cost_a_gateway_limited_turns_and_bytes(
    autojump_clock: MockClock,
) -> None:
    """Counted, so that no other load of the machine matters; `make cluster-cost` has the CPU."""
    many = 60
    found = await measured(many)
    idle, busy = (found[f"{what}: turns of the gateway a second"] for what in ("idle", "asked by others"))
    assert found["links of a worker"] == 1
    assert idle <= 4.3 * many, (
        "two to write a heartbeat a second and two to read one; one task sends them for all links"
    )
    assert busy - idle <= LinkSettings().announcements_max
    assert found["asked by the gateway: turns of the gateway a second"] <= idle + 1, "it knows what it asks itself"
    assert found["asked by others: bytes a second of the gateway"] <= 100 * LinkSettings().announcements_max
    assert found["idle: bytes a second of a worker"] <= 20
    publishing = found["publishing blocks: turns of the gateway a second"]
    assert publishing - idle <= 4 * STEPS * many, "to read a frame, to wake the subscription, and to apply its events"
    assert found["publishing blocks: bytes a block"] <= 11, "nine of its hash"


async def test_others_hear_that_a_prompt_of_a_gateway_with_engines_has_been_computed(autojump_clock: MockClock) -> None:
    front, back = a_node("front", routes=True, workers=0), a_node("back")
    async with joined(front, back, 1.0):
        (worker,) = front.workers("oak")
        local, own = back.local["w0"], request(1)
        async with local.ask(own, 1):
            await trio.sleep(0.5)
            assert worker.load.queued == len(own.tokens)
            local.begun(own.id)
            await trio.sleep(0.5)
            assert worker.load.queued == 0
