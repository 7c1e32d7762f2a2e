"""What a node knows of the others: what they tell, what the file says, and what is left when a link is lost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import trio
import trio.lowlevel
from attrs import evolve
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.kit.calls import BugCounter, mailbox
from actors.kit.priority_inbox import priority_inbox
from protocol.cluster import COUNT_MAX, Leg, Neighbour, NodeState, Offer, check_state
from protocol.errors import ActorLost, BadRequest, LinkLost, NotReady, PeerLost, PeerViolation, RequestError
from protocol.messages import EngineInfo, Finished, FinishReason, Generate, Started, Tokens, Usage
from protocol.peer import Peer
from supervisor.cluster.directory import Directory
from supervisor.cluster.node_records import FORGET_S, NODES_MAX, RUMOURS_MAX
from supervisor.cluster.workers import GuardedWorker, LocalWorker
from supervisor.links.link import Link
from supervisor.supervision.registration import Registration
from tests.rig.fake_engine import generate
from tests.system.simulator import sim_pair

INFO = EngineInfo("x", "1", 100, 64, 640, 64, 8, 1, True)
ONE = Offer("one", "oak", Leg.BOTH, 4, True, INFO)
TWO = Offer("two", "oak", Leg.BOTH, 4, True, INFO, running=2, waiting=1, tokens=70)


def a_link() -> Link:
    return Link(sim_pair()[0], Peer("here", serves_max=1))


def names(offers):
    return sorted(offer.name for offer in offers)


async def linked() -> tuple[Directory, Link]:
    directory, link = Directory("here"), a_link()
    directory.linked("far", link)
    return directory, link


# What is told -----------------------------------------------------------------------------


async def test_what_a_node_offers_appears_changes_and_vanishes() -> None:
    directory, link = await linked()
    assert directory.workers("oak") == []
    directory.merge_state("far", NodeState((ONE, TWO)))
    one, two = directory.workers("oak")
    assert (one.load.name, two.load.name) == ("far/one", "far/two")
    assert (two.load.busy, two.load.slots, two.load.tokens) == (3, 4, 70)
    assert one.link is two.link is link  # type: ignore[attr-defined]
    directory.merge_state("far", NodeState((evolve(ONE, running=4), evolve(TWO, up=False))))
    assert directory.workers("oak") == [one]
    assert one.load.busy == 4
    directory.merge_state("far", NodeState((TWO,)))
    assert names(directory.offers("oak")) == ["two"]
    assert directory.offers("elm") == directory.workers("elm") == []


async def test_a_node_that_drains_is_not_chosen_and_still_listed() -> None:
    directory, _ = await linked()
    directory.merge_state("far", NodeState((ONE,), draining=True))
    assert directory.workers("oak") == []
    assert directory.draining_workers == {"far/one"}
    assert names(directory.offers()) == ["one"]


async def test_two_nodes_may_have_workers_of_one_name() -> None:
    directory, _ = await linked()
    directory.linked("near", a_link())
    directory.merge_state("far", NodeState((ONE,), draining=True))
    directory.merge_state("near", NodeState((evolve(ONE, running=3),)))
    assert {name: offer.running for name, offer in directory.offers_by_name("oak").items()} == {
        "far/one": 0,
        "near/one": 3,
    }
    assert directory.offers_by_name("elm") == {}
    assert directory.draining_workers == {"far/one"}
    assert directory.pool("oak").expected() == {"far/one": Leg.BOTH, "near/one": Leg.BOTH}


async def test_whoever_waits_hears_of_each_change(autojump_clock: MockClock) -> None:
    directory, link = await linked()
    changes = []

    async def watch() -> None:
        while True:
            await directory.wait_changed()
            changes.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        for change in (
            lambda: directory.merge_state("far", NodeState((ONE,))),
            lambda: directory.linked("other", link),
            lambda: directory.unlinked("far", link),
            directory.drain,
        ):
            await trio.sleep(1)
            change()
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert changes == [1, 2, 3, 4]


# A link that is lost ----------------------------------------------------------------------


async def test_a_lost_link_takes_down_what_was_told_and_leaves_what_the_file_names() -> None:
    directory, link = Directory("here"), a_link()
    directory.configure("far", "h:1", (Offer("one", "oak", Leg.BOTH, 4, up=False),))
    assert [(each.name, each.up, each.engine) for each in directory.offers()] == [("one", False, None)]
    directory.linked("far", link)
    directory.merge_state("far", NodeState((evolve(ONE, running=3, tokens=9), TWO)))
    directory.unlinked("far", link)
    assert directory.workers("oak") == []
    (offer,) = directory.offers()
    assert (offer.name, offer.up, offer.running, offer.tokens) == ("one", False, 0, 0)
    assert offer.engine == INFO  # a client's limits stay what they were
    directory.linked("far", a_link())
    assert directory.workers("oak") == []
    directory.merge_state("far", NodeState((ONE, TWO)))
    assert names(each.offer for each in directory.workers("oak")) == ["one", "two"]  # type: ignore[attr-defined]


async def test_an_offer_of_the_file_that_is_not_told_of_is_listed_again_when_the_node_is_gone() -> None:
    directory, link = Directory("here"), a_link()
    directory.configure("far", "h:1", (Offer("one", "oak", Leg.BOTH, 4, up=False),))
    directory.linked("far", link)
    directory.merge_state("far", NodeState((TWO,)))
    assert names(directory.offers()) == ["two"]
    directory.unlinked("far", link)
    assert names(directory.offers()) == ["one"]


async def test_the_end_of_an_older_link_changes_nothing() -> None:
    directory, older = await linked()
    directory.merge_state("far", NodeState((ONE,)))
    newer = a_link()
    directory.linked("far", newer)
    directory.unlinked("far", older)
    directory.unlinked("nobody", older)
    (worker,) = directory.workers("oak")
    assert worker.link is newer  # type: ignore[attr-defined]


async def test_nobody_is_chosen_over_a_link_that_is_down_already(autojump_clock: MockClock) -> None:
    directory, link = await linked()
    directory.merge_state("far", NodeState((ONE,)))
    link.abort(PeerLost("cut"))
    assert directory.workers("oak") == []


async def test_a_worker_without_a_link_says_so_and_counts_nothing() -> None:
    directory, link = await linked()
    directory.merge_state("far", NodeState((ONE,)))
    (worker,) = directory.workers("oak")
    directory.unlinked("far", link)
    with pytest.raises(LinkLost, match="no link to node far"):
        async with worker.ask(generate(), 1):
            pass
    assert worker.busy == 0  # type: ignore[attr-defined]


# What cannot be true ----------------------------------------------------------------------

LIES = [
    NodeState((ONE, ONE)),
    NodeState((evolve(ONE, slots=0),)),
    NodeState((evolve(ONE, running=-1),)),
    NodeState((evolve(ONE, tokens=COUNT_MAX + 1),)),
    NodeState((evolve(ONE, kv_used=float("nan")),)),
    NodeState((evolve(ONE, kv_used=1.5),)),
    NodeState((evolve(ONE, name=""),)),
    NodeState((evolve(ONE, model="x\n"),)),
    NodeState(tuple(evolve(ONE, name=f"w{n}") for n in range(1025))),
    NodeState(neighbours=tuple(Neighbour(f"n{n}", None) for n in range(4097))),
    NodeState(neighbours=(Neighbour("x y", None),)),
    NodeState(neighbours=(Neighbour("x", "nowhere"),)),
    NodeState(neighbours=(Neighbour("x", "h:65536"),)),
    NodeState((evolve(ONE, engine=evolve(INFO, request_tokens_max=0)),)),
    NodeState((evolve(ONE, engine=evolve(INFO, kv_tokens_max=-5)),)),
    NodeState((evolve(ONE, engine=evolve(INFO, context_max=COUNT_MAX + 1)),)),
    NodeState((evolve(ONE, engine=evolve(INFO, bootstrap=("h", 0))),)),
]


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: repr(lie)[:70])
async def test_what_cannot_be_true_is_a_violation_and_changes_nothing(lie: NodeState) -> None:
    directory, _ = await linked()
    directory.merge_state("far", NodeState((TWO,)))
    with pytest.raises(PeerViolation):
        directory.merge_state("far", check_state(lie))
    assert directory.offers() == [TWO]
    assert set(directory.nodes) == {"far"}


# Where the others are ---------------------------------------------------------------------


def address(directory, name: str):
    return directory.nodes[name].address


async def test_the_file_knows_best_where_a_node_is_then_the_node_then_the_first_rumour() -> None:
    directory, _ = await linked()
    directory.configure("filed", "h:1")
    directory.merge_state("far", NodeState(neighbours=(Neighbour("filed", "liar:1"), Neighbour("heard", "h:2"))))
    assert (address(directory, "filed"), address(directory, "heard")) == ("h:1", "h:2")
    directory.linked("other", a_link())
    directory.merge_state("other", NodeState(neighbours=(Neighbour("heard", "h:3"), Neighbour("far", "h:4"))))
    assert (address(directory, "heard"), address(directory, "far")) == ("h:2", "h:4")
    directory.linked("heard", a_link())
    directory.merge_state("heard", NodeState(neighbours=(Neighbour("heard", "h:5"), Neighbour("here", "liar:2"))))
    assert address(directory, "heard") == "h:5"
    directory.linked("filed", a_link())
    directory.merge_state("filed", NodeState(neighbours=(Neighbour("filed", "h:6"),)))
    assert address(directory, "filed") == "h:1"
    assert "here" not in directory.nodes


async def test_two_nodes_that_heard_different_things_do_not_keep_each_other_talking() -> None:
    one, two = Directory("one"), Directory("two")
    one.linked("two", a_link())
    two.linked("one", a_link())
    one.merge_state("two", NodeState(neighbours=(Neighbour("x", "h:1"),), routes=True))
    two.merge_state("one", NodeState(neighbours=(Neighbour("x", "h:2"),), routes=True))
    one.linked("x", a_link())
    two.linked("x", a_link())
    before = one.state(), two.state()
    assert before[0].neighbours != before[1].neighbours
    one.merge_state("two", two.state())
    two.merge_state("one", one.state())
    assert (one.state(), two.state()) == before


async def test_rumours_beyond_some_number_are_not_believed_and_keep_no_real_node_out() -> None:
    directory, _ = await linked()
    directory.address = "h:1"
    for more in range(3):
        directory.merge_state("far", NodeState(neighbours=tuple(Neighbour(f"n{more}-{n}", "h:2") for n in range(4000))))
    assert len(directory.nodes) == 1 + RUMOURS_MAX < NODES_MAX
    assert directory.records.has_room_for("one more")
    assert Neighbour("here", "h:1", routes=True) in check_state(directory.state()).neighbours


async def test_a_node_tells_of_those_alone_that_it_has_a_link_to() -> None:
    directory, link = await linked()
    directory.configure("filed", "h:1")
    directory.merge_state("far", NodeState(neighbours=(Neighbour("far", "h:2"), Neighbour("heard", "h:3"))))
    assert directory.state().neighbours == (Neighbour("far", "h:2"),)
    directory.unlinked("far", link)
    assert directory.state().neighbours == ()
    assert set(directory.nodes) == {"filed", "far", "heard"}


async def forgets(directory, seconds: float):
    """Let a directory look, as it does now and then, at whom it may forget, and return whom it forgot."""
    gone = []
    for _ in range(int(seconds) // 60):
        await trio.sleep(60)
        gone += directory.records.forget()
    return sorted(gone)


async def test_whom_nobody_names_any_more_is_forgotten_after_a_while_and_can_be_heard_of_again(
    autojump_clock: MockClock,
) -> None:
    directory, link = await linked()
    directory.configure("filed", None)
    told = NodeState(neighbours=(Neighbour("heard", "h:1"), Neighbour("said", "h:2")))
    directory.merge_state("far", told)
    assert await forgets(directory, 10 * FORGET_S) == [], "they are named by a node that a link goes to"
    directory.merge_state("far", NodeState(neighbours=(Neighbour("said", "h:2"),)))
    assert await forgets(directory, FORGET_S) == []
    assert await forgets(directory, 60) == ["heard"]
    directory.unlinked("far", link)
    assert await forgets(directory, FORGET_S / 2) == []
    directory.linked("far", link)
    directory.merge_state("far", told)
    assert set(directory.nodes) == {"filed", "far", "heard", "said"}
    assert await forgets(directory, 2 * FORGET_S) == []
    directory.unlinked("far", link)
    assert await forgets(directory, 10 * FORGET_S) == ["far", "heard", "said"]
    assert set(directory.nodes) == {"filed"}


# Counts -----------------------------------------------------------------------------------


@asynccontextmanager
async def two_nodes() -> AsyncIterator[tuple[Directory, Directory]]:
    """A worker of node `far`, as that node has it and as node `here` has it over a link."""
    here, far = Directory("here"), Directory("far")
    address_, inbox = mailbox(1)
    plug = Registration(far.notify)
    offer = Offer("one", "oak", Leg.BOTH, 2, up=False)
    worker = far.local["one"] = LocalWorker("far", offer, address_, plug, None, far)
    near_end, far_end = sim_pair()
    asker = Link(near_end, Peer("here", serves_max=0))
    server = Link(far_end, Peer("far", serves_max=4), {("one", Generate): worker})
    bugs = BugCounter()

    async def one(call) -> None:
        with call.answering(bugs) as answer:
            answer.put(Started(), 0)
            for number in range(call.request.sampling.tokens_max):
                await trio.sleep(1)
                answer.put(Tokens([number]))
            answer.end(Finished(FinishReason.LENGTH, Usage(4, call.request.sampling.tokens_max)))

    async def serve() -> None:
        async with trio.open_nursery() as calls:
            async for call in inbox:
                calls.start_soon(one, call)

    async with trio.open_nursery() as nursery:
        for task in (asker.run, server.run, serve):
            nursery.start_soon(task)
        await asker.wait_ready()
        here.linked("far", asker)
        here.merge_state("far", NodeState((evolve(worker.offer, up=True, engine=INFO),)))
        yield here, far
        nursery.cancel_scope.cancel()


async def test_a_request_counts_while_it_runs_in_both_nodes(autojump_clock: MockClock) -> None:
    async with two_nodes() as (here, far), trio.open_nursery() as nursery:
        (there,) = here.workers("oak")

        async def ask(tokens_max: int) -> None:
            async with there.ask(generate(tokens_max=tokens_max), tokens_max) as replies:
                await replies.result()

        for tokens_max in (2, 4, 6):
            nursery.start_soon(ask, tokens_max)
        await trio.sleep(1)
        (told,) = far.state().offers
        assert (told.running, told.waiting, told.tokens) == (2, 1, 3 * 4 + 2 + 4 + 6)
        assert (there.load.busy, far.running) == (3, 3)
        with trio.fail_after(10):
            await far.wait_idle()
        assert trio.current_time() == 6
        assert far.state().offers[0].tokens == 0
        await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("tenths", range(0, 45, 3))
async def test_leaving_at_any_moment_leaves_no_count_behind(tenths: int, autojump_clock: MockClock) -> None:
    async with two_nodes() as (here, far):
        (there,) = here.workers("oak")
        with trio.move_on_after(tenths / 10):
            async with trio.open_nursery() as nursery:
                for tokens_max in (1, 3, 9, 9, 9, 9):

                    async def ask(tokens_max: int = tokens_max) -> None:
                        async with there.ask(generate(tokens_max=tokens_max), tokens_max) as replies:
                            await replies.result()

                    nursery.start_soon(ask)
        await trio.sleep(0.1)
        assert (there.busy, far.running, far.local["one"].tokens) == (0, 0, 0)  # type: ignore[attr-defined]
        assert far.state().offers[0].running == far.state().offers[0].waiting == 0


async def test_absurd_requests_leave_what_is_told_believable(autojump_clock: MockClock) -> None:
    async with two_nodes() as (here, far), trio.open_nursery() as nursery:
        (there,) = here.workers("oak")

        async def ask(tokens_max: int) -> None:
            async with there.ask(generate(tokens_max=tokens_max), 1) as replies:
                await replies.result()

        for tokens_max in (2**62, 2**62):
            nursery.start_soon(ask, tokens_max)
        await trio.sleep(0.5)
        assert check_state(far.state()).offers[0].tokens == COUNT_MAX
        nursery.cancel_scope.cancel()


# Going elsewhere --------------------------------------------------------------------------


@asynccontextmanager
async def waiting(here: LocalWorker, count: int) -> AsyncIterator[list[type[RequestError]]]:
    """Let requests wait at a worker that nobody serves, and return what becomes of each."""
    heard = []

    async def ask() -> None:
        try:
            async with here.ask(generate(), 9) as replies:
                await replies.result()
        except RequestError as error:
            heard.append(type(error))

    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        yield heard
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("leg", [Leg.BOTH, Leg.DECODE, Leg.PREFILL])
async def test_what_waits_at_a_worker_that_is_gone_goes_elsewhere_if_there_is_an_elsewhere(
    leg: Leg, autojump_clock: MockClock
) -> None:
    directory, _ = await linked()
    address, inbox = priority_inbox(2, lambda request: request.priority)
    plug = Registration(directory.notify)
    offer = Offer("here", "oak", Leg.BOTH, 2, up=False)
    worker = directory.local["here"] = LocalWorker("here", offer, address, plug, inbox, directory)
    directory.merge_state("far", NodeState((evolve(ONE, leg=leg),)))
    with plug.publish(SimpleNamespace(info=INFO)):
        async with waiting(worker, 4) as heard:
            assert inbox.waiting == (2, 2)
            worker.reroute_queued()
            await wait_all_tasks_blocked()
            elsewhere = leg is Leg.BOTH
            assert heard == [ActorLost] * 4 * elsewhere
            assert inbox.waiting == ((0, 0) if elsewhere else (2, 2))
    assert worker.busy == worker.tokens == 0


async def test_what_waits_for_an_engine_goes_elsewhere_as_soon_as_there_is_an_elsewhere(
    autojump_clock: MockClock,
) -> None:
    directory, _ = await linked()
    address, inbox = priority_inbox(2, lambda request: request.priority)
    offer, plug = Offer("here", "oak", Leg.BOTH, 2, up=False), Registration(directory.notify)
    worker = directory.local["here"] = LocalWorker("here", offer, address, plug, inbox, directory)
    async with waiting(worker, 3) as heard:
        worker.reroute_queued()
        directory.merge_state("far", NodeState((evolve(ONE, up=False),)))
        await wait_all_tasks_blocked()
        assert (heard, inbox.waiting) == ([], (2, 1))
        assert not directory.ranked("oak", Leg.BOTH)  # a router has looked
        directory.merge_state("far", NodeState((ONE,)))
        await wait_all_tasks_blocked()
        assert (heard, inbox.waiting) == ([ActorLost] * 3, (0, 0))
    with plug.publish(SimpleNamespace(info=INFO)):
        async with waiting(worker, 1) as heard:
            directory.merge_state("far", NodeState((ONE, TWO)))
            await wait_all_tasks_blocked()
            assert (heard, inbox.waiting) == ([], (1, 0)), "its engine is there"


async def test_what_waits_for_an_engine_goes_to_its_sibling_of_the_same_node_when_that_comes_up(
    autojump_clock: MockClock,
) -> None:
    directory = Directory("here")
    for name in ("one", "two"):
        address, inbox = priority_inbox(2, lambda request: request.priority)
        offer, plug = Offer(name, "oak", Leg.BOTH, 2, up=False), Registration(directory.notify)
        directory.local[name] = LocalWorker("here", offer, address, plug, inbox, directory)
    async with waiting(directory.local["one"], 2) as heard:
        directory.reroute_queued()
        await wait_all_tasks_blocked()
        assert heard == []
        with directory.local["two"].engine.publish(SimpleNamespace(info=INFO)):
            directory.reroute_queued()
            await wait_all_tasks_blocked()
            assert heard == [ActorLost] * 2


async def test_a_worker_whose_engine_is_down_takes_nothing_that_another_could(autojump_clock: MockClock) -> None:
    directory, _ = await linked()
    address, inbox = priority_inbox(2, lambda request: request.priority)
    offer, plug = Offer("here", "oak", Leg.BOTH, 2, up=False), Registration(directory.notify)
    worker = directory.local["here"] = LocalWorker("here", offer, address, plug, inbox, directory)
    async with waiting(worker, 1) as heard:
        assert (heard, inbox.waiting) == ([], (1, 0))  # it is the only one, and worth waiting for
    directory.merge_state("far", NodeState((ONE,)))
    async with waiting(worker, 1) as heard:
        assert heard == [NotReady]


@pytest.mark.parametrize(
    ("change", "credit", "says"),
    [
        ({"id": "a"}, 9, "32 hexadecimal digits"),
        ({"id": "A" * 32}, 9, "32 hexadecimal digits"),
        ({}, 8, "credit for 8 tokens, where 9 are asked for"),
    ],
)
async def test_what_another_node_asks_harms_no_other_request(
    change: dict[str, str], credit: int, says: str, autojump_clock: MockClock
) -> None:
    async with two_nodes() as (_, far):
        request = evolve(generate("ab" * 16, tokens_max=9), **change)
        with pytest.raises(BadRequest, match=says):
            async with GuardedWorker(far.local["one"]).ask(request, credit):
                pytest.fail("it may not ask")
        assert far.running == 0


async def test_an_id_is_in_use_until_its_answer_is_left(autojump_clock: MockClock) -> None:
    async with two_nodes() as (_, far):
        worker, request = GuardedWorker(far.local["one"]), generate("ab" * 16, tokens_max=9)
        async with worker.ask(request, 9):
            with pytest.raises(BadRequest, match="is being answered already"):
                async with worker.ask(request, 9):
                    pytest.fail("it may not ask")
        async with worker.ask(request, 9):
            assert far.running == 1
