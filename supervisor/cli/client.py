"""An operator's side of a link: asks the nodes of a cluster, each by the way on which it can be reached.

An operator greets a node as another node would, with the cluster's secret, but under a name that no node may have. A
node that does not listen is asked by the socket in its run folder, if it runs here as the same user, or else through a
node that has a link to it, as is one that cannot be reached from here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from math import isfinite
from pathlib import Path
from typing import TypeAlias

import trio
from attrs import define, field

from actors.kit.groups import leaves
from protocol.cluster import OPERATOR_PREFIX, GetStatus, Reload, Status
from protocol.cluster import check as check_state
from protocol.errors import (
    ActorError,
    DeadlineExceeded,
    EspalierError,
    PeerLost,
    PeerViolation,
    RequestError,
)
from protocol.greeting import Greeter
from protocol.kind import Message
from protocol.peer import Peer
from supervisor.cli.status_view import Seen
from supervisor.config.load import Cluster
from supervisor.control import unix_socket
from supervisor.deadlines import ANSWER_TIMEOUT_S, INDIRECT_TIMEOUT_S, RELOAD_ANSWER_TIMEOUT_S
from supervisor.engines.sglang.engine import SocketTransport
from supervisor.links import websocket
from supervisor.links.heartbeat import Heartbeat
from supervisor.links.link import Link
from supervisor.links.tls import LinkTls
from supervisor.links.transport import Transport

Route: TypeAlias = websocket.Endpoint | Path
"""How a node is asked: at an address, or by the socket in its run folder."""

NAME_BYTES = 4


@define(eq=False)
class ClusterClient:
    """Asks the nodes of one cluster; `routes` says where each of those that were seen is asked."""

    cluster: Cluster
    secret: bytes = field(repr=False)
    tls: LinkTls | None
    new_nonce: Callable[[], bytes]
    folders: Mapping[str, Path] = field(factory=dict)  # the run folders of nodes that run here
    routes: dict[str, Route] = field(factory=dict)

    async def look(self) -> dict[str, Seen]:
        """Return how every node of the cluster is, also of one that has joined, or why that cannot be known."""
        names = dict.fromkeys((*self.cluster.node, *self.folders))
        listens = {name: at for name in names if (at := self.route(name)) is not None}
        seen: dict[str, Seen] = dict.fromkeys(
            self.cluster.node, "it does not listen, and no node that answers has a link to it"
        )
        self.routes.clear()
        async with trio.open_nursery() as nursery:
            for name, at in listens.items():
                nursery.start_soon(self._see, name, at, seen)
        with trio.move_on_after(INDIRECT_TIMEOUT_S):  # a node may tell of many that do not answer, and lie
            while await self._see_others(seen):
                pass
        return seen

    async def _see_others(self, seen: dict[str, Seen]) -> bool:
        """Ask for the nodes that those which were seen have links to; return whether any more were seen."""
        before = dict(self.routes)
        for through, at in before.items():
            status = seen[through]
            others = [each.node for each in status.links if each.up] if isinstance(status, Status) else []
            for name in sorted(set(others) - self.routes.keys()):
                seen[name] = f"node {through} has a link to it, through which it has not answered in time"
                await self._see(name, at, seen)
        return len(self.routes) > len(before)

    async def ask(self, name: str, request: Message) -> Message:
        """Ask by the way on which the node was seen; raises `PeerLost`, `PeerRefused` or what it answers with."""
        return await self._asked(self.routes[name], request)

    async def _see(self, name: str, at: Route, seen: dict[str, Seen]) -> None:
        try:
            status = checked(await self._asked(at, GetStatus(name)))
        except EspalierError as error:
            seen[name] = f"nobody listens at {at}" if nothing_listens(error) else str(error)
            return
        if isinstance(status, Status):
            seen[name] = status
            self.routes[name] = at

    async def _asked(self, at: Route, request: Message) -> Message:
        section, answers = self.cluster.cluster, list[Message | None]()
        name = f"{OPERATOR_PREFIX}{self.new_nonce()[:NAME_BYTES].hex()}"

        async def ask(transport: Transport) -> None:
            peer, heart = Peer(name, serves_max=0), Heartbeat(section.heartbeat_s, section.silent_s)
            answers.append(await _answer(Link(transport, peer, lost_error=_Lost, heartbeat=heart), request))

        async def talk(wire: websocket.WebSocketTransport) -> None:
            certified = wire.certified() if section.verifies_node_names else None
            greeter = Greeter("dials", section.name, name, self.secret, self.new_nonce(), certified=certified)
            await websocket.greet(wire, greeter, section.handshake_s)
            await ask(wire)

        if isinstance(at, Path):
            await _connected(at, ask)
        else:
            await websocket.dial(at, self.tls.dials if self.tls else None, section.handshake_s, talk)
        if not answers or answers[0] is None:
            raise PeerLost(f"{at} ended the link before it answered")
        return answers[0]

    def route(self, name: str) -> Route | None:
        """Return where a node listens, or its run folder if it runs here; None if it cannot be asked by itself."""
        node = self.cluster.node.get(name)
        if node is None or node.dial_address is None:
            return self.folders.get(name)
        return websocket.Endpoint.read(node.dial_address)


async def _connected(folder: Path, ask: Callable[[Transport], Awaitable[None]]) -> None:
    """Ask at the socket in a run folder; raises `PeerLost` if nobody listens there."""
    try:
        with unix_socket.address(folder) as where:
            stream = await trio.open_unix_socket(where)
    except OSError as error:
        raise PeerLost(f"the node of {folder} cannot be reached: {error}") from error
    async with stream:
        await ask(SocketTransport(stream))


class _Lost(RequestError):
    """The link to a node went down while an operator waited."""


async def _answer(link: Link, request: Message) -> Message | None:
    """Return the answer to one question over a link that is carried for it alone."""
    result: Message | None = None
    failure: EspalierError | None = None
    within_s = RELOAD_ANSWER_TIMEOUT_S if isinstance(request, Reload) else ANSWER_TIMEOUT_S

    async def carry() -> None:
        nonlocal failure
        try:
            await link.run()
        except ActorError as error:
            failure = error
        asking.cancel(reason="the link is lost")

    async with trio.open_nursery() as nursery:
        asking = trio.CancelScope()
        nursery.start_soon(carry)
        try:
            with asking, trio.fail_after(within_s):
                await link.wait_ready()
                async with link.ask(request, 0) as answer:
                    result = await answer.result()
        except trio.TooSlowError:
            failure = DeadlineExceeded(f"it did not answer within {within_s:g} s")
        except RequestError as error:
            if not isinstance(error, _Lost):
                failure = error
        nursery.cancel_scope.cancel(reason="it has answered, or will not")
    if result is None and failure is not None:
        raise failure
    return result


def nothing_listens(error: BaseException | None) -> bool:
    """Whether nobody listens there, which is more than that nobody could be reached."""
    if error is None:
        return False
    gone = ConnectionRefusedError | FileNotFoundError
    return all(isinstance(leaf, gone) or nothing_listens(leaf.__cause__) for leaf in leaves(error))


def checked(status: Message) -> Message:
    """Return what a node says if it can be true, else raise `PeerViolation`."""
    if isinstance(status, Status):
        check_state(status.state)
        times = (status.up_s, *(child.since_s for child in status.tree), *(link.silent_s for link in status.links))
        if not all(map(isfinite, times)):
            raise PeerViolation("it tells times that cannot be")
    return status


def has_link_to(seen: Seen, name: str) -> bool:
    """Whether a node that was seen has a link to another one."""
    return isinstance(seen, Status) and any(link.node == name and link.up for link in seen.links)
