"""The client of a command: it asks the nodes of a cluster, each by its own route.

A command greets a node as another node would, with the cluster's secret, but under a name that no node may have. A node
that does not listen, or whose secret only its launcher knows, is asked by the socket in its run folder, if it runs here
as the same user. A node out of reach is asked through another one with a link to it. Nodes are not trusted: their
reports of others are validated, and all requests through other nodes share one time limit.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from math import isfinite
from pathlib import Path
from typing import TypeAlias

import trio
from attrs import define, field

from actors.kit.groups import leaves
from protocol.dialects.operations import parse
from protocol.errors import ActorError, DeadlineExceeded, EspalierError, PeerLost, PeerViolation, RequestError
from protocol.link.greeting import Greeter
from protocol.link.peer import Peer
from protocol.messages.cluster import OPERATOR_PREFIX, Drain, GetStatus, Operate, Reload, Status, check_state
from protocol.messages.kind import Message
from protocol.messages.operations import OPERATION_NAMED
from supervisor.cli.status_view import StatusOrError
from supervisor.config.schema import Cluster
from supervisor.control import unix_socket
from supervisor.deadlines import (
    ANSWER_TIMEOUT_S,
    INDIRECT_TIMEOUT_S,
    RELOAD_ANSWER_TIMEOUT_S,
    RESTART_ANSWER_TIMEOUT_S,
    WAY_S,
)
from supervisor.links import websocket
from supervisor.links.endpoint import Endpoint
from supervisor.links.heartbeat import Heartbeat
from supervisor.links.link import Link
from supervisor.links.tls import LinkTls
from supervisor.links.transport import SocketTransport, Transport

NodeRoute: TypeAlias = Endpoint | Path
"""The route to a node: an address, or the run folder with its socket."""

NAME_BYTES = 4
FAST_POLL_S = 0.25  # the time between two polls of a draining or starting node


@define(eq=False)
class ClusterClient:
    """A client of all nodes of a cluster; `routes` has the routes of answering nodes.

    Each poll looks for run folders again, since a node that was started again has another one.
    """

    cluster: Cluster
    secret: bytes = field(repr=False)
    tls: LinkTls | None
    new_nonce: Callable[[], bytes]
    folders: Mapping[str, Path] = field(factory=dict)  # the run folders of nodes that run here
    find_folders: Callable[[], Mapping[str, Path]] = dict  # returns the present ones, none if they are not known
    routes: dict[str, NodeRoute] = field(factory=dict)

    async def poll(self) -> dict[str, StatusOrError]:
        """Return the status of every node of the cluster, joined ones included, or the reason why it is unknown."""
        self.folders = self.find_folders() or self.folders
        names = dict.fromkeys((*self.cluster.node, *self.folders))
        own_routes = {name: route for name in names if (route := self.route(name)) is not None}
        statuses: dict[str, StatusOrError] = dict.fromkeys(
            self.cluster.node, "it does not listen, and no node that answers has a link to it"
        )
        routes: dict[str, NodeRoute] = {}  # local, since several polls may run
        async with trio.open_nursery() as nursery:
            for name, route in own_routes.items():
                nursery.start_soon(self._poll_at, name, route, statuses, routes)
        with trio.move_on_after(INDIRECT_TIMEOUT_S):  # a node may name many silent ones
            while await self._poll_others(statuses, routes):
                pass
        self.routes = routes
        return statuses

    async def _poll_others(self, statuses: dict[str, StatusOrError], routes: dict[str, NodeRoute]) -> bool:
        """Ask the peers of the answering nodes through them; return whether any more have answered."""
        before = dict(routes)
        for through, route in before.items():
            status = statuses[through]
            others = [link.node for link in status.links if link.up] if isinstance(status, Status) else []
            for name in sorted(set(others) - routes.keys()):
                statuses[name] = f"node {through} has a link to it, through which it has not answered in time"
                await self._poll_at(name, route, statuses, routes)
        return len(routes) > len(before)

    async def ask(self, name: str, request: Message) -> Message:
        """Return a node's answer to a request; raises `PeerLost`, `PeerRefused` or the node's own error."""
        return await self._ask_at(self.routes[name], request)

    async def _poll_at(
        self, name: str, route: NodeRoute, statuses: dict[str, StatusOrError], routes: dict[str, NodeRoute]
    ) -> None:
        try:
            status = validated_status(await self._ask_at(route, GetStatus(name)))
        except EspalierError as error:
            statuses[name] = f"nobody listens at {route}" if nothing_listens(error) else str(error)
            return
        if isinstance(status, Status):
            statuses[name] = status
            routes[name] = route

    async def _ask_at(self, route: NodeRoute, request: Message) -> Message:
        section, answers = self.cluster.cluster, list[Message | None]()
        name = f"{OPERATOR_PREFIX}{self.new_nonce()[:NAME_BYTES].hex()}"

        async def ask(transport: Transport) -> None:
            peer, heartbeat = Peer(name, serves_max=0), Heartbeat(section.heartbeat_s, section.silent_s)
            answers.append(await _answer(Link(transport, peer, lost_error=_LinkLost, heartbeat=heartbeat), request))

        async def greet_and_ask(transport: websocket.WebSocketTransport) -> None:
            certified = transport.certificate_names() if section.verifies_node_names else None
            greeter = Greeter("dials", section.name, name, self.secret, self.new_nonce(), certified=certified)
            await websocket.greet(transport, greeter, websocket.HANDSHAKE_S)
            await ask(transport)

        if isinstance(route, Path):
            await _ask_socket(route, ask)
        else:
            await websocket.dial(route, self.tls.dials if self.tls else None, websocket.HANDSHAKE_S, greet_and_ask)
        if not answers or answers[0] is None:
            raise PeerLost(f"{route} ended the link before it answered")
        return answers[0]

    def route(self, name: str) -> NodeRoute | None:
        """Return a node's address, or its run folder if it runs here; None if it has no route of its own.

        Where this command has neither a secret nor a certificate, the folder goes first.
        """
        node, folder = self.cluster.node.get(name), self.folders.get(name)
        address = None if node is None else node.dial_address
        return address if address is not None and (folder is None or self.secret or self.tls) else folder


async def _ask_socket(folder: Path, ask: Callable[[Transport], Awaitable[None]]) -> None:
    """Ask at the socket in a run folder; raises `PeerLost` if nothing listens there."""
    try:
        with unix_socket.socket_address(folder) as path:
            stream = await trio.open_unix_socket(path)
    except OSError as error:
        raise PeerLost(f"the node of {folder} cannot be reached: {error}") from error
    async with stream:
        await ask(SocketTransport(stream))


class _LinkLost(RequestError):
    """The link to a node went down while a command waited."""


def _timeout_s(request: Message) -> float:
    match request:
        case Reload():
            return RELOAD_ANSWER_TIMEOUT_S
        case Operate(operation=name, fields=fields):
            operation = OPERATION_NAMED[name]
            return operation.answered_within_s(parse(operation, fields)) + WAY_S
        case Drain(restarts=True):
            return RESTART_ANSWER_TIMEOUT_S
    return ANSWER_TIMEOUT_S


async def _answer(link: Link, request: Message) -> Message | None:
    """Return the answer to one request over a link of its own."""
    result: Message | None = None
    failure: EspalierError | None = None
    within_s = _timeout_s(request)

    async def run_link() -> None:
        nonlocal failure
        try:
            await link.run()
        except ActorError as error:
            failure = error
        asking.cancel(reason="the link is lost")

    async with trio.open_nursery() as nursery:
        asking = trio.CancelScope()
        nursery.start_soon(run_link)
        try:
            with asking, trio.fail_after(within_s):
                await link.wait_ready()
                async with link.ask(request, 0) as answer:
                    result = await answer.result()
        except trio.TooSlowError:
            failure = DeadlineExceeded(f"it did not answer within {within_s:g} s")
        except RequestError as error:
            if not isinstance(error, _LinkLost):
                failure = error
        nursery.cancel_scope.cancel(reason="it has answered, or will not")
    if result is None and failure is not None:
        raise failure
    return result


def nothing_listens(error: BaseException | None) -> bool:
    """Whether an error proves the absence of a listener at an address, and not merely an address out of reach."""
    if error is None:
        return False
    gone = ConnectionRefusedError | FileNotFoundError
    return all(isinstance(leaf, gone) or nothing_listens(leaf.__cause__) for leaf in leaves(error))


def validated_status(status: Message) -> Message:
    """Return a node's answer; raises `PeerViolation` if it is a status with impossible numbers."""
    if isinstance(status, Status):
        check_state(status.state)
        times = (status.up_s, *(child.since_s for child in status.tree), *(link.silent_s for link in status.links))
        if not all(map(isfinite, times)):
            raise PeerViolation("it reports times that cannot be")
    return status


def has_link_to(statuses: StatusOrError, name: str) -> bool:
    """Whether a node has answered and has a link to another one."""
    return isinstance(statuses, Status) and any(link.node == name and link.up for link in statuses.links)
