"""The control service of a node: it answers requests of operators for status, drain, reload and operations.

An operator may reach one node only, so a request has the name of its node, and any other node forwards it: over its
link to the named node, or over a link to a routing node, since routing nodes have links to all. So a request crosses at
most two links, and each node on its way times out a little before its caller: the error then names the slow link.

This service changes nothing itself. The node carries out drains and reloads, and sets their functions once it runs.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping

import trio
from attrs import astuple, define, evolve, field

from actors.kit.calls import Function
from protocol.dialects.operations import outcome_json, parse
from protocol.errors import DeadlineExceeded, InternalError, NotReady, RequestError, Unsupported
from protocol.messages.cluster import (
    ChildState,
    Drain,
    EjectionState,
    GateState,
    GetStatus,
    LinkState,
    NodeState,
    Operate,
    Operated,
    PoolState,
    Reload,
    Reloaded,
    Status,
)
from protocol.messages.engine import Done, EngineLoad
from protocol.messages.kind import Message
from protocol.messages.operations import OPERATION_NAMED
from supervisor.cluster import operations
from supervisor.cluster.directory import Directory
from supervisor.deadlines import HOP_MARGIN_S
from supervisor.links.link import Link
from supervisor.links.serving import Services
from supervisor.supervision.status import TreeStatus

log = logging.getLogger(__name__)

Loads = Callable[[], Awaitable[Mapping[str, EngineLoad]]]


async def _drain_too_early(_: bool) -> None:  # as `NodeControl.drain` is called
    await trio.lowlevel.checkpoint()
    raise NotReady("the node does not run yet")


async def _reload_too_early() -> Reloaded:
    await trio.lowlevel.checkpoint()
    raise NotReady("the node does not run yet")


@define(eq=False)
class NodeControl:
    """The control service of one node; `drain` and `reload` raise `NotReady` until the node runs."""

    directory: Directory
    run: str  # an id of this run of the process
    version: str
    loads: Loads
    tree_status: TreeStatus | None = None
    gate_state: Callable[[], GateState | None] = lambda: None  # of a node with a gateway
    ejections: Callable[[], tuple[EjectionState, ...]] = tuple
    pools: Callable[[], tuple[PoolState, ...]] = tuple  # of a node with a gateway
    drain: Callable[[bool], Awaitable[None]] = field(
        default=_drain_too_early
    )  # whether the launcher is to start the node again
    reload: Callable[[], Awaitable[Reloaded]] = field(default=_reload_too_early)

    @property
    def services(self) -> Services:
        """The requests answered by this service, addressed to no worker."""
        answer: Function[Message, Message, Message] = Function(self.answer)
        return {("", request): answer for request in (GetStatus, Drain, Reload, Operate)}

    async def answer(self, request: Message) -> Message:
        """Answer a request about this node, or forward it to the named node.

        Raises `NotReady` without a link towards the node, `DeadlineExceeded` shortly before the caller's own deadline,
        and the node's own errors.
        """
        assert isinstance(request, GetStatus | Drain | Reload | Operate)
        if request.node not in {"", self.directory.name}:
            return await self._forward(request)
        match request:
            case GetStatus():
                return await self._status()
            case Drain():
                await self.drain(request.restarts)
                return Done()
            case Reload():
                return await self.reload()
            case Operate():
                return await self._operate(request)

    async def _operate(self, request: Operate) -> Operated:
        """Have an engine of this node carry out an operation; raises the error of the engine, or `Unsupported`."""
        if (operation := OPERATION_NAMED.get(request.operation)) is None:
            raise Unsupported(f"node {self.directory.name} has no operation {request.operation!r}")
        engine = f"{self.directory.name}/{request.engine}"
        outcomes = await operations.operate(self.directory, parse(operation, request.fields), engine)
        outcome = outcomes[engine]
        if isinstance(outcome, RequestError):
            raise outcome
        return Operated(outcome_json(outcome).decode())

    async def _forward(self, request: GetStatus | Drain | Reload | Operate) -> Message:
        if (link := self._link_towards(request.node)) is None:
            raise NotReady(f"node {self.directory.name} has no link to node {request.node}")
        try:
            with trio.fail_at(trio.current_effective_deadline() - HOP_MARGIN_S):
                async with link.ask(request, 0) as answer:
                    result = await answer.result()
        except trio.TooSlowError as error:
            raise DeadlineExceeded(
                f"node {request.node} has not answered node {self.directory.name} in time"
            ) from error
        if not isinstance(result, Status | Done | Reloaded | Operated):
            raise InternalError(f"node {request.node} answered with something else")
        return result

    def _link_towards(self, node: str) -> Link | None:
        """Return the link to a node; if there is none, one to a routing node, since routing nodes have links to all.

        A routing node forwards to no other routing node, so no request travels in a circle.
        """
        link = self.directory.node(node).link
        if link is not None or self.directory.routes:
            return link
        nodes = self.directory.nodes.values()
        return next((node.link for node in nodes if node.link is not None and node.state.routes), None)

    async def _status(self) -> Status:
        state = _with_memory_use(self.directory.state(), await self.loads())
        links = tuple(
            _link_state(name, node.link)
            for name, node in sorted(self.directory.nodes.items())
            if node.link is not None or self.directory.should_link(name)
        )
        up_s, members = (
            (0.0, ()) if self.tree_status is None else (self.tree_status.uptime_s, self.tree_status.members())
        )
        tree = tuple(ChildState(*astuple(member)) for member in members)
        refused = tuple(f"engine {name} {why}" for name, why in self.directory.models.rejections.items())
        identity = self.directory.name, self.run, self.version, round(up_s, 3)
        return Status(*identity, state, tree, links, self.gate_state(), refused, self.ejections(), self.pools())


def _with_memory_use(state: NodeState, loads: Mapping[str, EngineLoad]) -> NodeState:
    """Return the state of a node with the used share of KV memory, as its engines report it."""
    offers = []
    for offer in state.offers:
        load = loads.get(offer.name)
        if load is not None and offer.engine is not None and offer.engine.kv_tokens_max:
            share = load.kv_tokens_used / offer.engine.kv_tokens_max
            offers.append(evolve(offer, kv_used=min(1.0, max(0.0, round(share, 4)))))
        else:
            offers.append(offer)
    return evolve(state, offers=tuple(offers))


def _link_state(name: str, link: Link | None) -> LinkState:
    if link is None:
        return LinkState(name, up=False)
    statistics = link.statistics()
    streams = statistics.streams_asked + statistics.streams_served
    silent_s = round(link.silent_s, 3)
    traffic = link.traffic
    totals = (traffic.messages_sent, traffic.bytes_sent, traffic.bytes_received)
    return LinkState(name, True, silent_s, streams, *totals, link.stalled)
