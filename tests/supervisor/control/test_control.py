"""A node answers requests of operators, and forwards those about nodes that they cannot reach themselves."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any, NoReturn, cast, overload

import pytest
import trio
from attrs import define, evolve, field
from trio.testing import MockClock

from actors.kit.calls import Address, mailbox
from protocol.errors import (
    BadRequest,
    DeadlineExceeded,
    InternalError,
    LinkLost,
    NotFound,
    NotReady,
    PeerLost,
    PeerRefused,
    Unsupported,
)
from protocol.link.peer import Peer
from protocol.messages.cluster import (
    ChildState,
    Drain,
    GetStatus,
    Leg,
    LinkState,
    NodeState,
    Offer,
    Operate,
    Operated,
    Reload,
    Reloaded,
    Status,
)
from protocol.messages.engine import Done, EngineLoad
from protocol.messages.kind import Message
from protocol.messages.operations import EngineMetrics, FlushCache
from supervisor import deadlines
from supervisor.cluster.directory import Directory
from supervisor.cluster.in_flight import InFlight
from supervisor.cluster.link_settings import LinkSettings
from supervisor.cluster.mesh import OPERATORS_MAX, Mesh
from supervisor.cluster.operations import engine_services
from supervisor.cluster.workers import LocalWorker
from supervisor.control.control import NodeControl
from supervisor.engines.work import request_inbox
from supervisor.links.heartbeat import Heartbeat
from supervisor.links.link import Link
from supervisor.links.serving import Service, Services, under_name
from supervisor.links.websocket import WebSocketTransport
from supervisor.supervision.events import ChildEvent, ChildEventKind
from supervisor.supervision.registration import Registration
from supervisor.supervision.status import TreeStatus
from supervisor.supervision.tree import Child, Tree
from tests.rig.gateway import INFO
from tests.rig.network import SimTransport
from tests.system.simulator import sim_pair


async def nothing(*, task_status: trio.TaskStatus[None]) -> None:
    task_status.started()


@define(eq=False)
class Node:
    """A node's control service, with a record of its drains and reloads."""

    name: str
    routes: bool = True
    loads: dict[str, EngineLoad] = field(factory=dict)
    done: list[str] = field(factory=list)
    reloads: Callable[[], Awaitable[Reloaded]] | None = None  # instead of what it does otherwise
    asks: Callable[[], Awaitable[dict[str, EngineLoad]]] | None = None  # its engines, in the same way
    directory: Directory = field(init=False)
    controls: NodeControl = field(init=False)
    tree_status: TreeStatus = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.directory = Directory(self.name, routes=self.routes)
        self.tree_status = TreeStatus(
            Tree(name=self.name, children=(Child(name="links", run=nothing, about="other nodes"),))
        )
        running: Registration[Any] = Registration(current=self)
        self.controls = NodeControl(self.directory, f"run of {self.name}", "1.2", self.load, running)

    async def load(self) -> dict[str, EngineLoad]:
        await trio.lowlevel.checkpoint()
        return self.loads if self.asks is None else await self.asks()

    def gate_state(self) -> None:
        """Return nothing: it has no gateway."""

    async def drain_for_operator(self, restarts: bool) -> None:
        await trio.lowlevel.checkpoint()
        self.done.append("restart" if restarts else "drain")

    async def reload(self) -> Reloaded:
        await trio.lowlevel.checkpoint()
        if self.reloads is not None:
            return await self.reloads()
        self.done.append("reload")
        return Reloaded((f"{self.name} did",), ("not all",))


@asynccontextmanager
async def joined(one: Node, other: Node) -> AsyncIterator[SimTransport]:
    """Join two nodes by a link, and yield one end of its transport."""
    near, far = sim_pair()
    links = [
        Link(wire, Peer(node.name, serves_max=4), node.controls.services) for node, wire in ((one, near), (other, far))
    ]

    async def carry(link: Link) -> None:
        with suppress(PeerLost):
            await link.run()

    async with trio.open_nursery() as nursery:
        for link in links:
            nursery.start_soon(carry, link)
        for link in links:
            await link.wait_ready()
        one.directory.linked(other.name, links[0])
        other.directory.linked(one.name, links[1])
        yield near
        nursery.cancel_scope.cancel()


@overload
async def ask(node: Node, request: GetStatus) -> Status: ...
@overload
async def ask(node: Node, request: Drain) -> Done: ...
@overload
async def ask(node: Node, request: Reload) -> Reloaded: ...
@overload
async def ask(node: Node, request: Operate) -> Operated: ...
async def ask(node: Node, request: GetStatus | Drain | Reload | Operate) -> Any:
    """Return the answer of a node's control service."""
    server = node.controls.services["", type(request)]
    async with server.ask(request, 0) as answer:
        return await answer.result()


async def status_of(asked: Service) -> Status:
    """Return the status with which a node answers there."""
    async with asked.ask(GetStatus(), 0) as answer:
        status = await answer.result()
    assert isinstance(status, Status)
    return status


def worker(one: Node, offer: Offer, registration: Registration[Any], **load: Any) -> LocalWorker:
    address, inbox = request_inbox(1)
    return LocalWorker(
        node="one",
        idle_offer=offer,
        address=address,
        engine=registration,
        inbox=inbox,
        directory=one.directory,
        **load,
    )


# One node -----------------------------------------------------------------------------------


async def test_a_status_has_the_tree_the_links_and_the_engines_of_a_node(autojump_clock: MockClock) -> None:
    one = Node("one", loads={"tiny-0": EngineLoad(1, 0, 1024)})
    info = evolve(INFO, kv_tokens_max=4096)
    registration: Registration[Any] = Registration(one.directory.notify)
    offered = Offer("tiny-0", "tiny", Leg.BOTH, 4, up=False)
    one.directory.local["tiny-0"] = worker(one, offered, registration, in_flight=InFlight(requests=6, tokens=90))
    one.directory.configure("two", "127.0.0.1:1")
    one.tree_status.on_event(ChildEvent("one/links", ChildEventKind.STARTED, trio.current_time()))
    with registration.publish(SimpleNamespace(info=info)):
        await trio.sleep(3)
        status = await ask(one, GetStatus())
    assert (status.node, status.run, status.version, status.up_s) == ("one", "run of one", "1.2", 3)
    assert status.tree == (ChildState("one", "up", 0, 3), ChildState("one/links", "up", 0, 3, "other nodes"))
    assert status.links == (LinkState("two", up=False),)
    busy = evolve(offered, up=True, engine=info, running=4, waiting=2, tokens=90, kv_used=0.25)
    assert status.state.offers == (busy,)
    assert status.state.neighbours == (), "it has no link to the other"


async def test_a_drain_and_a_reload_are_passed_to_the_node(autojump_clock: MockClock) -> None:
    one = Node("one")
    assert await ask(one, Drain()) == Done()
    assert await ask(one, Reload("one")) == Reloaded(("one did",), ("not all",))
    assert await ask(one, Drain("one", restarts=True)) == Done()
    assert one.done == ["drain", "reload", "restart"]


async def test_a_node_that_does_not_run_yet_can_be_neither_drained_nor_reloaded(autojump_clock: MockClock) -> None:
    fresh = NodeControl(Directory("one"), "", "1.2", Node("one").load)
    for request in (Drain(), Reload()):
        async with fresh.services["", type(request)].ask(request, 0) as answer:
            with pytest.raises(NotReady):
                await answer.result()
    assert (await status_of(fresh.services["", GetStatus])).tree == ()


async def test_an_engine_of_a_node_carries_out_an_operation_for_an_operator(autojump_clock: MockClock) -> None:
    one = Node("one")
    registration: Registration[Any] = Registration(one.directory.notify)
    info = evolve(INFO, operations=("metrics",))
    services = under_name("tiny-0", engine_services("tiny-0", registration, Registration()))
    offered = Offer("tiny-0", "tiny", Leg.BOTH, 4, up=False)
    one.directory.local["tiny-0"] = worker(one, offered, registration, services=services)

    async def operate(_: Message) -> EngineMetrics:
        await trio.lowlevel.checkpoint()
        return EngineMetrics("x 1")

    with registration.publish(SimpleNamespace(info=info, operate=operate)):
        assert await ask(one, Operate("tiny-0", "metrics")) == Operated('{"left_out":0,"text":"x 1"}')
        for request, error in (
            (Operate("oak", "metrics"), NotFound),
            (Operate("tiny-0", "juggle"), Unsupported),
            (Operate("tiny-0", "metrics", '{"more": 1}'), BadRequest),
            (Operate("tiny-0", "metrics", node="two"), NotReady),
        ):
            with pytest.raises(error):
                await ask(one, request)


async def test_a_bug_fails_one_request_and_no_other(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    one = Node("one")

    def bug() -> NoReturn:
        raise ZeroDivisionError

    one.reloads = bug
    with pytest.raises(InternalError):
        await ask(one, Reload())
    assert "a bug failed a Reload" in caplog.text
    assert await ask(one, Drain()) == Done()


# Forwarding -----------------------------------------------------------------------------------


async def test_a_request_about_another_node_is_forwarded_to_it(autojump_clock: MockClock) -> None:
    one, front = Node("one"), Node("front")
    async with joined(one, front):
        status = await ask(one, GetStatus("front"))
        assert (status.node, status.run) == ("front", "run of front")
        assert [(link.node, link.up) for link in status.links] == [("one", True)]
        assert status.links[0].messages_sent > 0 < status.links[0].bytes_received
        assert await ask(one, Drain("front")) == Done()
        assert (await ask(one, Reload("front"))).changed == ("front did",)
    assert (one.done, front.done) == ([], ["drain", "reload"])


async def test_an_error_names_a_node_without_a_link_and_a_lost_link_fails_the_request(
    autojump_clock: MockClock,
) -> None:
    one, front = Node("one"), Node("front")
    with pytest.raises(NotReady, match="node one has no link to node front"):
        await ask(one, Drain("front"))
    async with joined(one, front) as wire:
        release = trio.Event()

        async def hangs() -> dict[Any, Any]:
            wire.cut()
            await release.wait()
            return {}

        front.asks = hangs
        with pytest.raises(LinkLost):
            await ask(one, GetStatus("front"))
        release.set()


@asynccontextmanager
async def joined_by_a_router() -> AsyncIterator[tuple[Node, Node]]:
    """Yield two of three nodes that have no link to each other, but to the third, which routes."""
    one, front, two = Node("one", routes=False), Node("front"), Node("two", routes=False)
    async with joined(one, front), joined(front, two):
        one.directory.merge_state("front", NodeState((), routes=True))
        yield one, two


async def test_o_the_longest_reload_is_answered_in_time_through_two_nodes(autojump_clock: MockClock) -> None:
    async def longest() -> Reloaded:
        await trio.sleep(deadlines.RELOAD_QUEUED_MAX_S)
        return Reloaded(("two did",))

    async with joined_by_a_router() as (one, two):
        two.reloads = longest
        with trio.fail_after(deadlines.RELOAD_ANSWER_TIMEOUT_S):
            assert (await ask(one, Reload("two"))).changed == ("two did",)


@pytest.mark.parametrize(
    ("request_", "within_s"), [(Reload("two"), deadlines.RELOAD_ANSWER_TIMEOUT_S), (GetStatus("two"), 5.0)]
)
async def test_o_a_node_that_never_answers_is_named_before_the_caller_gives_up(
    request_: Reload | GetStatus, within_s: float, autojump_clock: MockClock
) -> None:
    async with joined_by_a_router() as (one, two):
        two.reloads = two.asks = trio.sleep_forever
        began = trio.current_time()
        with trio.fail_after(within_s), pytest.raises(DeadlineExceeded, match="node two has not answered node front"):
            await ask(one, request_)
        assert within_s - deadlines.WAY_S <= trio.current_time() - began < within_s - deadlines.HOP_MARGIN_S


# Operators ------------------------------------------------------------------------------------


def links_of(node: Node, operators: int = 0) -> Mesh:
    flush: Address[Message, Message, Message]
    flush, _ = mailbox(1)
    served: Services = {**node.controls.services, ("tiny-0", FlushCache): flush}
    return Mesh(
        name=node.name,
        section=LinkSettings(),
        directory=node.directory,
        services=served,
        listen=None,
        secret=b"",
        tls=None,
        new_nonce=bytes,
        chance=random.Random(0),
        operators=operators,
    )


@asynccontextmanager
async def operator(links: Mesh) -> AsyncIterator[tuple[Link, list[PeerRefused]]]:
    """Yield the link of an operator whom a node has greeted, and the errors that refused it."""
    near, far = sim_pair()
    link = Link(near, Peer("operator-0", serves_max=0), heartbeat=Heartbeat())
    ended = []

    async def carry() -> None:
        with suppress(PeerLost):
            await link.run()

    async def attend() -> None:
        try:
            await links.serve_operator(cast("WebSocketTransport", far))
        except PeerRefused as error:
            ended.append(error)
        finally:
            far.close()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(attend)
        nursery.start_soon(carry)
        yield link, ended
        near.close()


async def test_an_operator_is_answered_and_is_not_treated_as_a_node(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Node("one")
    links = links_of(one)
    changes = []
    monkeypatch.setattr(Directory, "notify", lambda _: changes.append("changed"))
    async with operator(links) as (link, _):
        status = await status_of(link)
        assert status.node == "one"
        assert status.links == ()
        assert status.state is not None
        assert {neighbour.name for neighbour in status.state.neighbours} <= {"one"}
        async with link.ask(FlushCache(), 0, "tiny-0") as answer:
            with trio.fail_after(1), pytest.raises(NotReady, match="there is no tiny-0 here"):
                await answer.result()
        await trio.sleep(60)  # no announcement is sent to it, which would break its protocol
        assert (await status_of(link)).node == "one"
        assert links.statistics().operators == 1
    assert (one.directory.nodes, changes, links.statistics().operators) == ({}, [], 0)


async def test_operators_beyond_the_limit_are_refused(autojump_clock: MockClock) -> None:
    links = links_of(Node("one"), OPERATORS_MAX)
    async with operator(links) as (link, ended):
        await link.wait_lost()
        assert [str(error) for error in ended] == [f"{OPERATORS_MAX} operators are here already"]
    assert links.statistics().operators == OPERATORS_MAX
