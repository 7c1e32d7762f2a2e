"""The control service of a node: it answers requests of operators for status, drain, reload and operations.

An operator may reach one node only, so a request has the name of its node, and any other node forwards it: over its
link to the named node, or over a link to a routing node, since routing nodes have links to all. So a request crosses at
most two links, and each node on its way times out a little before its caller: the error then names the slow link.

This service changes nothing itself. The node carries out drains and reloads, and is published here while it runs.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import trio
from attrs import astuple, evolve, field, frozen

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
from supervisor.cluster import operations, readiness
from supervisor.cluster.directory import Directory
from supervisor.deadlines import HOP_MARGIN_S
from supervisor.links.link import Link
from supervisor.links.serving import Services
from supervisor.supervision.registration import Registration
from supervisor.supervision.status import TreeStatus

log = logging.getLogger(__name__)

Loads = Callable[[], Awaitable[Mapping[str, EngineLoad]]]


class ControlledNode(Protocol):
    """The node as its control service drives it, while it runs."""

    @property
    def tree_status(self) -> TreeStatus:
        """The status of its tree."""

    def gate_state(self) -> GateState | None:
        """Return the state of its admission gate, None without a gateway."""

    async def drain_for_operator(self, restarts: bool) -> None:
        """Begin to drain; the launcher starts the node again after that if it `restarts`. Raises `NotReady`."""

    async def reload(self) -> Reloaded:
        """Read the node's file again, and return what has changed."""


@frozen(eq=False)
class NodeControl:
    """The control service of one node; a drain or a reload raises `NotReady` until the node runs."""

    directory: Directory
    run: str  # an id of this run of the process
    version: str
    loads: Loads
    node: Registration[ControlledNode] = field(factory=Registration)  # while it runs
    ejections: Callable[[], tuple[EjectionState, ...]] = tuple  # of a node with a gateway
    pools: Callable[[], tuple[PoolState, ...]] = tuple  # of a node with a gateway

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
                await self._running().drain_for_operator(request.restarts)
                return Done()
            case Reload():
                return await self._running().reload()
            case Operate():
                return await self._operate(request)

    def _running(self) -> ControlledNode:
        if (node := self.node.current) is None:
            raise NotReady("the node does not run yet")
        return node

    async def _operate(self, request: Operate) -> Operated:
        """Have an engine of this node carry out an operation; raises the error of the engine, or `Unsupported`."""
        if (operation := OPERATION_NAMED.get(request.operation)) is None:
            raise Unsupported(f"node {self.directory.name} has no operation {request.operation!r}")
        engine = f"{self.directory.name}/{request.engine}"
        body = request.fields if request.file is None else bytes(request.file.data)
        outcomes = await operations.operate(self.directory, parse(operation, body), engine)
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
        node = self.node.current
        unused = self.directory.models.rejections | readiness.unpaired(self.directory)
        return Status(
            node=self.directory.name,
            run=self.run,
            version=self.version,
            up_s=0.0 if node is None else round(node.tree_status.uptime_s, 3),
            state=state,
            tree=() if node is None else tuple(ChildState(*astuple(each)) for each in node.tree_status.members()),
            links=links,
            gate=None if node is None else node.gate_state(),
            refused=tuple(f"engine {name} {why}" for name, why in unused.items()),
            aside=self.ejections(),
            pools=self.pools(),
            weights=self.directory.weights(),
        )


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
    statistics, traffic = link.statistics(), link.traffic
    return LinkState(
        node=name,
        up=True,
        silent_s=round(link.silent_s, 3),
        streams=statistics.streams_asked + statistics.streams_served,
        messages_sent=traffic.messages_sent,
        bytes_sent=traffic.bytes_sent,
        bytes_received=traffic.bytes_received,
        stalled=link.stalled,
    )
