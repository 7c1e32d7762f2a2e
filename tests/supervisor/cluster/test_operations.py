"""Operations of the engines of a cluster: who is asked, and what becomes of each engine."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock, wait_all_tasks_blocked

from protocol.dialects.operations import failure
from protocol.errors import (
    ActorLost,
    BadRequest,
    DeadlineExceeded,
    EngineStuck,
    InternalError,
    NotFound,
    NotReady,
    Overloaded,
    RequestError,
    Unsupported,
)
from protocol.link.peer import Peer
from protocol.messages.adapters import AdapterList, LoadAdapter, UnloadAdapter
from protocol.messages.cluster import Leg
from protocol.messages.engine import Done
from protocol.messages.kind import Message
from protocol.messages.operation import EngineOperation, OperationScope
from protocol.messages.operations import OPERATION_OF, EngineMetrics, FlushCache, GetMetrics
from supervisor.cluster import operations
from supervisor.cluster.directory import Directory
from supervisor.links.link import Link
from supervisor.links.serving import Services
from supervisor.supervision.registration import Registration
from tests.rig.gateway import INFO
from tests.rig.nodes import unlink
from tests.rig.tasks import call_later
from tests.supervisor.cluster.test_engine_control import OFFER, Engine, carry, front, life_of, registered
from tests.system.simulator import sim_pair

FLUSH = OPERATION_OF[FlushCache]


async def failure_of_flush(directory: Directory) -> RequestError | None:
    """Flush all caches, and return the error that stands for those of all engines."""
    return failure(FLUSH, await operations.operate(directory, FlushCache()))


# Flushes -------------------------------------------------------------------------------------


async def test_every_engine_of_the_cluster_is_flushed(autojump_clock: MockClock) -> None:
    engines = [Engine(takes_s=1) for _ in range(3)]
    async with front(engines[0], a=engines[1], b=engines[2]) as (directory, _):
        outcomes = await operations.operate(directory, FlushCache())
        assert outcomes == dict.fromkeys(("a/tiny-0", "b/tiny-0", "main/tiny-0"), Done())
        assert ([engine.flushed for engine in engines], trio.current_time()) == ([1, 1, 1], 1)


async def test_the_error_of_a_flush_names_every_engine_with_its_outcome(autojump_clock: MockClock) -> None:
    far = {"a": Engine(), "busy": Engine(busy=True), "gone": Engine(), "slow": Engine(takes_s=60), "starts": None}
    async with front(Engine(), **far) as (directory, transports):
        directory.configure("gone", None, [OFFER])
        transports["gone"].cut()
        await wait_all_tasks_blocked()
        unlink(directory, "gone")
        error = await failure_of_flush(directory)
        assert trio.current_time() == FLUSH.within_s
    assert isinstance(error, Overloaded)
    assert error.detail.split("; ") == [
        "engine busy/tiny-0 was not flushed: requests run",
        "engine gone/tiny-0 was not flushed: there is no link to node gone",
        "engine slow/tiny-0 was not flushed: it did not answer within 5 s",
        "engine starts/tiny-0 was not flushed: it is starting",
        "flushed: a/tiny-0, main/tiny-0",
    ]


async def test_a_flush_that_failed_where_no_engine_is_busy_is_not_ready(autojump_clock: MockClock) -> None:
    async with front(None) as (directory, _):
        error = await failure_of_flush(directory)
        assert isinstance(error, NotReady)
        assert error.detail == "engine main/tiny-0 was not flushed: it is starting"


@pytest.mark.parametrize("broken", ["here", "there"])
async def test_a_bug_in_an_engine_that_is_flushed_is_an_internal_error(broken: str, autojump_clock: MockClock) -> None:
    engines = {name: Engine(broken=name == broken, busy=name != broken) for name in ("here", "there")}
    async with front(engines["here"], there=engines["there"]) as (directory, _):
        error = await failure_of_flush(directory)
        assert isinstance(error, InternalError)
        assert "tiny-0 was not flushed" in error.detail


# Who is asked -------------------------------------------------------------------------


def listing(engine: Engine, *names: str) -> Engine:
    """Return an engine that lists these operations."""
    engine.info = evolve(INFO, operations=names)  # type: ignore[misc]  # of this one alone
    return engine


async def test_only_engines_that_list_an_operation_are_asked_for_it(autojump_clock: MockClock) -> None:
    class Metrics(Engine):
        async def operate(self, request: Message) -> Message:
            await trio.lowlevel.checkpoint()
            return EngineMetrics("x")

    async with front(listing(Metrics(), "metrics"), a=Metrics(), starts=None) as (directory, _):
        outcomes = await operations.operate(directory, GetMetrics())
        assert outcomes["main/tiny-0"] == EngineMetrics("x")
        assert isinstance(outcomes["a/tiny-0"], Unsupported), "a node that has no such message would end the link"
        assert isinstance(outcomes["starts/tiny-0"], Unsupported)


async def test_an_engine_is_named_alone_or_behind_its_node(autojump_clock: MockClock) -> None:
    engines = [Engine(), Engine()]
    async with front(engines[0], a=engines[1]) as (directory, _):
        assert await operations.operate(directory, FlushCache(), "a/tiny-0") == {"a/tiny-0": Done()}
        assert [engine.flushed for engine in engines] == [0, 1]
        with pytest.raises(BadRequest, match="several engines are named 'tiny-0': a/tiny-0, main/tiny-0"):
            await operations.operate(directory, FlushCache(), "tiny-0")
        with pytest.raises(NotFound, match="there is no engine 'oak'"):
            await operations.operate(directory, FlushCache(), "oak")
    async with front(engines[0]) as (directory, _):
        assert await operations.operate(directory, FlushCache(), "tiny-0") == {"main/tiny-0": Done()}


async def test_an_operation_may_be_for_one_engine_alone_or_for_encoders_too(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with front(Engine(), a=Engine()) as (directory, _):
        (worker,) = directory.records["a"].workers.values()
        worker.offer = evolve(worker.offer, leg=Leg.ENCODE)
        assert (await operations.operate(directory, FlushCache())).keys() == {"main/tiny-0", "a/tiny-0"}
        monkeypatch.setitem(OPERATION_OF, FlushCache, evolve(FLUSH, scope=OperationScope.ENGINES))
        assert (await operations.operate(directory, FlushCache())).keys() == {"main/tiny-0"}
        monkeypatch.setitem(OPERATION_OF, FlushCache, evolve(FLUSH, scope=OperationScope.ONE))
        with pytest.raises(BadRequest, match="flush-cache is for one engine: name it"):
            await operations.operate(directory, FlushCache())
        assert await operations.operate(directory, FlushCache(), "main/tiny-0") == {"main/tiny-0": Done()}


async def test_an_operation_of_a_model_asks_the_engines_of_that_model_alone(autojump_clock: MockClock) -> None:
    class Adapted(Engine):
        async def operate(self, request: Message) -> Message:
            await trio.lowlevel.checkpoint()
            return AdapterList(())

    names = ("load-adapter", "unload-adapter")
    async with front(listing(Adapted(), *names), a=listing(Adapted(), *names), b=Engine()) as (directory, _):
        for worker in directory.records["a"].workers.values():
            worker.offer = evolve(worker.offer, engine=evolve(INFO, operations=names))
        asked = await operations.operate(directory, UnloadAdapter("x"))
        assert asked.keys() == {"main/tiny-0", "a/tiny-0", "b/tiny-0"}, "there is one model"
        (worker,) = directory.records["b"].workers.values()
        worker.offer = evolve(worker.offer, model="oak")
        with pytest.raises(BadRequest, match="several models are served here: oak, tiny; name one"):
            await operations.operate(directory, UnloadAdapter("x"))
        with pytest.raises(NotFound, match="no engine of a model 'elm'; there is oak, tiny"):
            await operations.operate(directory, UnloadAdapter("x", model="elm"))
        asked = await operations.operate(directory, UnloadAdapter("x", model="tiny"))
        assert asked == dict.fromkeys(("a/tiny-0", "main/tiny-0"), AdapterList(()))
        (refused,) = (await operations.operate(directory, LoadAdapter("x", "/x", model="oak"))).values()
        assert isinstance(refused, Unsupported)
        assert "does not carry out load-adapter: it needs [engine.NAME.adapters]" in refused.detail


# Out of service -----------------------------------------------------------------------


@pytest.fixture
def leaving(monkeypatch: pytest.MonkeyPatch) -> EngineOperation:
    """The flush, as an operation that takes its engine out of service."""
    row = evolve(FLUSH, leaves_service=True)
    monkeypatch.setattr(operations, "OPERATIONS", (row,))
    monkeypatch.setitem(OPERATION_OF, FlushCache, row)
    return row


def one_of(engine: Registration[Any], tree: trio.Nursery) -> Services:
    """Return the services of the engine `one`, whose life has this nursery."""
    return operations.engine_services("one", engine, life_of(engine, tree))


@pytest.mark.parametrize(("takes_s", "busy", "ends_at"), [(2.0, False, 2.0), (2.0, True, 2.0)])
async def test_an_engine_is_out_of_service_for_as_long_as_its_operation_runs(
    takes_s: float, busy: bool, ends_at: float, leaving: EngineOperation, autojump_clock: MockClock
) -> None:
    engine = Engine(takes_s=takes_s, busy=busy)
    async with front(engine) as (directory, _), trio.open_nursery() as nursery:
        registration: Registration[Any] = directory.local["tiny-0"].engine
        nursery.start_soon(operations.operate, directory, FlushCache())
        await trio.sleep(1)
        assert (registration.current, registration.status_text) == (None, "is out of service: flush-cache runs")
        assert registration.live is engine
        await trio.sleep_until(ends_at - 0.1)
        assert registration.current is None
        await trio.sleep_until(ends_at + 0.1)
        assert registration.current is engine


async def test_an_engine_whose_operation_does_not_end_is_stuck(
    leaving: EngineOperation, autojump_clock: MockClock
) -> None:
    with pytest.RaisesGroup(EngineStuck, flatten_subgroups=True):
        async with front(Engine(takes_s=60)) as (directory, _), trio.open_nursery() as nursery:
            nursery.start_soon(operations.operate, directory, FlushCache())
            await trio.sleep_forever()
    assert trio.current_time() == 2 * leaving.within_s


async def test_the_asker_of_an_operation_gets_its_timeout_on_time_and_a_second_operation_is_refused(
    leaving: EngineOperation, autojump_clock: MockClock
) -> None:
    engine = Engine(takes_s=7)
    async with front(engine, a=Engine(takes_s=7)) as (directory, _):
        outcomes = await operations.operate(directory, FlushCache())
        assert trio.current_time() == leaving.within_s
        assert {type(outcome) for outcome in outcomes.values()} == {DeadlineExceeded}
        outcomes = await operations.operate(directory, FlushCache())
        assert {str(outcome) for outcome in outcomes.values()} == {"it is out of service: flush-cache runs"}
        assert trio.current_time() == leaving.within_s, "it was refused at once"
        await trio.sleep(3)
        registration: Registration[Any] = directory.local["tiny-0"].engine
        assert (engine.flushed, registration.current) == (1, engine)


async def test_a_lost_link_ends_at_once_and_its_operation_continues(
    leaving: EngineOperation, autojump_clock: MockClock
) -> None:
    engine, near_and_far = Engine(takes_s=3), sim_pair()
    async with trio.open_nursery() as tree, trio.open_nursery() as nursery:
        services = one_of(registered(engine), tree)
        asker = Link(near_and_far[0], Peer("b", serves_max=0))
        served = Link(near_and_far[1], Peer("a", serves_max=8), services)

        async def ask() -> None:
            with pytest.raises(RequestError):
                async with asker.ask(FlushCache(), 0, "one") as answer:
                    await answer.result()

        nursery.start_soon(carry, asker)
        nursery.start_soon(call_later, 1, near_and_far[0].cut)
        nursery.start_soon(ask)
        await carry(served)
        assert trio.current_time() < 2
        await trio.sleep(3)
        assert engine.flushed == 1


async def test_an_operation_ends_with_its_engine(leaving: EngineOperation, autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as tree, trio.open_nursery() as nursery:
        registration = registered(Engine(takes_s=4))
        life = life_of(registration, tree)
        services = operations.engine_services("one", registration, life)
        nursery.start_soon(call_later, 1, tree.cancel_scope.cancel)
        assert life.live is not None
        with life.live, trio.CancelScope(shield=True):
            async with services["one", FlushCache].ask(FlushCache(), 0) as answer:
                with pytest.raises(ActorLost):
                    await answer.result()
        assert (trio.current_time(), registration.in_service) == (1, True)
