"""What a node answers to operators, and to other nodes that pass an operator's question on."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping

import trio
from attrs import astuple, define, evolve, field

from actors.kit.calls import Function
from protocol.cluster import (
    ChildState,
    Drain,
    EjectionState,
    GateState,
    GetStatus,
    LinkState,
    NodeState,
    Reload,
    Reloaded,
    Status,
)
from protocol.errors import DeadlineExceeded, InternalError, NotReady
from protocol.kind import Message
from protocol.messages import Done, EngineLoad
from supervisor.cluster.directory import Directory
from supervisor.deadlines import HOP_MARGIN_S
from supervisor.links.link import Link
from supervisor.links.serving import Services
from supervisor.supervision.status import TreeStatus

log = logging.getLogger(__name__)

Loads = Callable[[], Awaitable[Mapping[str, EngineLoad]]]


def _nothing() -> None:
    raise NotReady("the node does not run yet")


async def _not_yet() -> Reloaded:
    await trio.lowlevel.checkpoint()
    raise NotReady("the node does not run yet")


@define(eq=False)
class NodeControl:
    """What operators ask of one node; `drain` and `reload` are the node's own, once it runs."""

    directory: Directory
    run: str
    version: str
    loads: Loads
    tree_status: TreeStatus | None = None
    gate_state: Callable[[], GateState | None] = lambda: None  # of a node with a gateway
    ejections: Callable[[], tuple[EjectionState, ...]] = tuple
    drain: Callable[[], None] = field(default=_nothing)
    reload: Callable[[], Awaitable[Reloaded]] = field(default=_not_yet)

    @property
    def services(self) -> Services:
        """What is asked here, to the node as such."""
        function: Function[Message, Message, Message] = Function(self.answer)
        return {("", GetStatus): function, ("", Drain): function, ("", Reload): function}

    async def answer(self, request: Message) -> Message:
        """Answer a question about this node, or pass it on to the one that it is about.

        Raises `NotReady` if there is no link to that one, `DeadlineExceeded` before whoever asks gives up, and whatever
        that one answers with.
        """
        assert isinstance(request, GetStatus | Drain | Reload)  # nothing else is served by this
        if request.node not in {"", self.directory.name}:
            return await self._pass_on(request)
        match request:
            case GetStatus():
                return await self._status()
            case Drain():
                self.drain()
                return Done()
            case Reload():
                return await self.reload()

    async def _pass_on(self, request: GetStatus | Drain | Reload) -> Message:
        if (link := self._towards(request.node)) is None:
            raise NotReady(f"node {self.directory.name} has no link to node {request.node}")
        try:
            with trio.fail_at(trio.current_effective_deadline() - HOP_MARGIN_S):
                async with link.ask(request, 0) as answer:
                    result = await answer.result()
        except trio.TooSlowError as error:
            raise DeadlineExceeded(
                f"node {request.node} has not answered node {self.directory.name} in time"
            ) from error
        if not isinstance(result, Status | Done | Reloaded):
            raise InternalError(f"node {request.node} answered with something else")
        return result

    def _towards(self, node: str) -> Link | None:
        """Return the link to a node; where there is none, one to a node that routes, which has links to all.

        One that routes never passes a question on to another that does, so that none goes round in a circle.
        """
        link = self.directory.node(node).link
        if link is not None or self.directory.routes:
            return link
        nodes = self.directory.nodes.values()
        return next((each.link for each in nodes if each.link is not None and each.state.routes), None)

    async def _status(self) -> Status:
        state = _filled(self.directory.state(), await self.loads())
        links = tuple(
            _link(name, node.link)
            for name, node in sorted(self.directory.nodes.items())
            if node.link is not None or self.directory.should_link(name)
        )
        up_s, members = (
            (0.0, ()) if self.tree_status is None else (self.tree_status.uptime_s, self.tree_status.members())
        )
        tree = tuple(ChildState(*astuple(member)) for member in members)
        refused = tuple(f"engine {name} {why}" for name, why in self.directory.models.rejections.items())
        who = self.directory.name, self.run, self.version, round(up_s, 3)
        return Status(*who, state, tree, links, self.gate_state(), refused, self.ejections())


def _filled(state: NodeState, loads: Mapping[str, EngineLoad]) -> NodeState:
    """Return the state with what the engines themselves say of their memory."""
    offers = []
    for offer in state.offers:
        load = loads.get(offer.name)
        if load is not None and offer.engine is not None and offer.engine.kv_tokens_max:
            used = load.kv_tokens_used / offer.engine.kv_tokens_max
            offers.append(evolve(offer, kv_used=min(1.0, max(0.0, round(used, 4)))))
        else:
            offers.append(offer)
    return evolve(state, offers=tuple(offers))


def _link(name: str, link: Link | None) -> LinkState:
    if link is None:
        return LinkState(name, up=False)
    statistics = link.statistics()
    streams = statistics.streams_asked + statistics.streams_served
    silent_s = round(link.silent_s, 3)
    traffic = link.traffic
    crossed = (traffic.messages_sent, traffic.bytes_sent, traffic.bytes_received)
    return LinkState(name, True, silent_s, streams, *crossed, link.stalled)
