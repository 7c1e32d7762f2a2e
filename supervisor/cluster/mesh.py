"""The links of a node: one to every other, dialed by the node whose name comes first, and dialed again when lost."""

from __future__ import annotations

import logging
import ssl
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from email.utils import formatdate
from functools import partial
from math import inf
from typing import cast

import trio
from attrs import define, field

from actors.kit.calls import Askable
from protocol.cluster import OPERATOR_PREFIX, TELL_S_MAX, LoadUpdate, Neighbour, NodeState, check, check_loads
from protocol.errors import ActorError, LinkReplaced, PeerLost, PeerRefused, PeerViolation, StartFailed
from protocol.frames import Bye, encode
from protocol.greeting import Greeter, Incarnation, Role
from protocol.kind import Message
from protocol.peer import Peer
from supervisor.cluster.announcements import Announcer
from supervisor.cluster.directory import FORGET_S, Directory
from supervisor.cluster.workers import GuardedWorker
from supervisor.config.load import LOOPBACK_HOSTS, WILDCARD_HOSTS, ClusterSection
from supervisor.links import websocket
from supervisor.links.heartbeat import Heartbeat, HeartbeatTask
from supervisor.links.link import Link
from supervisor.links.link_log import LinkLog
from supervisor.links.serving import Services
from supervisor.links.tls import LinkTls
from supervisor.links.traffic import Traffic
from supervisor.printable import printable
from supervisor.sockets.descriptor_reserve import GuardedListener, Reserve
from supervisor.sockets.unauthenticated import UnauthenticatedConnections, address_of
from supervisor.supervision.supervise import OnStarted, RandomSource
from supervisor.supervision.tree import Backoff

log = logging.getLogger(__name__)

OPERATORS_MAX = 16  # at a time; a constant, because a person who looks is one or two, and a program waits its turn
OPERATOR_STREAMS_MAX = 4
ANY = Incarnation()
NAME_CONFLICT = "twin"  # the code of a Bye to a second process of one name
FORGETS_S = FORGET_S / 10  # between two looks at who may be forgotten


@define(eq=False)
class _Carried:
    """One link, which node has dialed it, and which process of its name the other end is."""

    link: Link
    dialer: str
    incarnation: Incarnation
    gone: trio.Event = field(factory=trio.Event)  # it is no longer the link to its node
    scope: trio.CancelScope = field(factory=trio.CancelScope)


@define(eq=False)
class Mesh:
    """What the links of one node share."""

    name: str
    section: ClusterSection
    directory: Directory
    serves: Services
    listen: websocket.Endpoint | None
    secret: bytes = field(repr=False)  # empty: any node may link
    tls: LinkTls | None  # None: plain
    new_nonce: Callable[[], bytes]
    chance: RandomSource
    join: Sequence[websocket.Endpoint] = ()
    dial: Callable[[websocket.Endpoint, ssl.SSLContext | None, float, websocket.ConnectionHandler], Awaitable[None]] = (
        websocket.dial
    )
    accept: Callable[
        [trio.SocketStream, ssl.SSLContext | None, float, websocket.ConnectionHandler], Awaitable[None]
    ] = websocket.accept
    incarnation: Incarnation = Incarnation()
    host: str = ""  # where other nodes find this one if it listens at every address
    port: int | None = None  # once it listens
    reserve: Reserve = field(factory=Reserve)  # of descriptors, which no connection takes
    teller: Announcer = field()
    heartbeat_task: HeartbeatTask = field(factory=HeartbeatTask)
    traffic: defaultdict[str, Traffic] = field(factory=lambda: defaultdict(Traffic))  # with each node, in all
    _nodes: LinkLog = field(factory=LinkLog)
    _others: LinkLog = field(factory=LinkLog)  # of those who have not proved who they are
    _dialing: set[str] = field(factory=set)  # who is dialed, by a task of its own
    _dialed: set[str] = field(factory=set)  # whose link was dialed from here
    _carried: dict[str, _Carried] = field(factory=dict)
    _strangers: UnauthenticatedConnections[trio.SocketStream] = field(factory=UnauthenticatedConnections)
    _operators: int = 0

    @teller.default
    def _teller(self) -> Announcer:
        return Announcer(self.directory)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the links until cancelled; `started()` means that this node can be reached."""
        self._dialing.clear()  # what an earlier run did has ended with it
        async with trio.open_nursery() as nursery:
            if self.listen is not None:
                await self._listen(nursery, self.listen)
            nursery.start_soon(self._forget)
            nursery.start_soon(self.heartbeat_task.run)
            nursery.start_soon(self.teller.run, lambda: self.section.tell_s)
            task_status.started()
            for at in self.join:
                nursery.start_soon(self._keep, None, at)
            while True:
                self._dial_new(nursery)
                await self.directory.wait_changed()

    def send_bye(self, detail: str) -> None:
        """End every link, and say why."""
        for node in self.directory.nodes.values():
            if node.link is not None:
                node.link.send_bye("draining", detail)

    # Who dials ---------------------------------------------------------------------------

    def _dial_new(self, nursery: trio.Nursery) -> None:
        """Begin to dial whoever has become known and is ours to dial: of two that can be found the first by name dials.

        A node that joins dials all, since others may have heard of it where it was before.
        """
        everybody = self.directory.address is None or bool(self.join)
        for name, address in self.directory.addresses():
            ours = name not in self._dialing and (everybody or self.name < name)
            if ours and _found(address) and self.directory.should_link(name):
                self._dialing.add(name)
                nursery.start_soon(self._keep, name, None)

    async def _keep(self, name: str | None, join: websocket.Endpoint | None) -> None:
        """Dial a node again and again while there is no link to it; the longer it does not answer, the more seldom."""
        peer, failures, met_at = name, 0, inf

        async def talk(wire: websocket.WebSocketTransport) -> None:
            nonlocal peer, met_at
            (peer, incarnation), met_at = await self._greeted("dials", name, wire), trio.current_time()
            if peer.startswith(OPERATOR_PREFIX):
                raise PeerRefused(f"{at} greets as an operator, who is no node")
            if (
                peer not in self._dialed or self._twin(peer, incarnation) is not None
            ):  # who is refused there, with a word
                await self._carry(peer, wire, self.name, incarnation)

        while True:
            while (carried := self._carried.get(peer or "")) is not None:
                await carried.gone.wait()
            if (at := join or self._address(name)) is None:
                self._dialing.discard(name or "")  # it was forgotten; whoever hears of it again dials it again
                return
            section = self.section  # as it is by now
            failures, met_at = failures + 1, inf
            try:
                await self.dial(at, self.tls.dials if self.tls else None, section.handshake_s, talk)
            except ActorError as error:
                self._nodes.say(name or str(at), error)
            except Exception:
                log.exception("a bug ended a link")
            if trio.current_time() - met_at > section.silent_s:  # it was a link, and a good one
                failures = 1
            backoff = Backoff(min_s=section.retry_min_s, max_s=section.retry_max_s, jitter=1.0)
            await trio.sleep(backoff.wait_s(failures, self.chance.random()))

    def _address(self, name: str | None) -> websocket.Endpoint | None:
        address = self.directory.node(name or "").address
        return None if address is None else websocket.Endpoint.read(address)

    async def _forget(self) -> None:
        """Forget, now and then, the nodes that nobody names any more, and what has crossed the links to them."""
        while True:
            await trio.sleep(FORGETS_S)
            for name in self.directory.forget():
                self.traffic.pop(name, None)

    async def _listen(self, nursery: trio.Nursery, at: websocket.Endpoint) -> None:
        try:
            listeners = await trio.open_tcp_listeners(at.port, host=at.host)
        except OSError as error:
            raise StartFailed(f"node {self.name} cannot listen on {at}: {error.strerror or error}") from error
        self.port = int(listeners[0].socket.getsockname()[1])
        everywhere = at.host in WILDCARD_HOSTS
        # Who listens everywhere on a host called localhost cannot tell other hosts where: it dials them.
        nowhere = everywhere and self.host in (*WILDCARD_HOSTS, *LOOPBACK_HOSTS)
        self.directory.address = (
            None if nowhere else str(websocket.Endpoint(self.host if everywhere else at.host, self.port))
        )
        guarded = [GuardedListener(listener, self.reserve) for listener in listeners]
        nursery.start_soon(partial(trio.serve_listeners, self._accepted, guarded))

    async def _accepted(self, stream: trio.SocketStream) -> None:
        """Carry the link of a node that has dialed; what is wrong with it is its own affair."""
        who, host = "", _host(stream)

        async def talk(wire: websocket.WebSocketTransport) -> None:
            nonlocal who
            who, incarnation = await self._greeted("listens", None, wire)
            self._strangers.remove(stream)
            if who.startswith(OPERATOR_PREFIX):
                await self._attend(wire)
            else:
                await self._carry(who, wire, who, incarnation)

        try:
            with trio.CancelScope() as scope:
                self._strangers.add(stream, address_of(stream), scope)
                self._make_room()
                await self.accept(stream, self.tls.listens if self.tls else None, self.section.handshake_s, talk)
        except ActorError as error:
            known = self._others if not who or who.startswith(OPERATOR_PREFIX) else self._nodes
            known.say("an operator" if who.startswith(OPERATOR_PREFIX) else who or host, error)
        except Exception:
            log.exception("a bug ended a link")
        finally:
            self._strangers.remove(stream)

    def _make_room(self) -> None:
        """End a stranger if there are too many: a node needs a moment only, and must not be kept out by others."""
        most = self.section.handshakes_max
        while len(self._strangers) > most and (oldest := self._strangers.close_oldest_of_busiest_address()) is not None:
            said = f"more than {most} (handshakes_max) that do not say who they are"
            self._others.say(_host(oldest), PeerRefused(said))

    # One link ----------------------------------------------------------------------------

    async def _greeted(
        self, role: Role, expects: str | None, wire: websocket.WebSocketTransport
    ) -> tuple[str, Incarnation]:
        """Return the name that the other end has proved, and which process of that name it is."""
        nonce, incarnation = self.new_nonce(), self.incarnation
        certified = wire.certified() if self.section.verifies_node_names else None
        greeter = Greeter(role, self.section.name, self.name, self.secret, nonce, expects, incarnation, certified)
        return await websocket.greet(wire, greeter, self.section.handshake_s), greeter.peer_incarnation

    async def _carry(
        self, peer: str, wire: websocket.WebSocketTransport, dialer: str, incarnation: Incarnation = ANY
    ) -> None:
        """Carry a link until it is lost, or another to the same node takes its place.

        Raises `PeerLost`, `PeerViolation` and, for a name that no node has or that another process has, `PeerRefused`.
        """
        check(NodeState(neighbours=(Neighbour(peer, None),)))
        if not self.directory.has_room_for(peer):
            raise PeerRefused(f"node {peer} was refused: no more nodes can be known here")
        if (twin := self._twin(peer, incarnation)) is not None:
            with suppress(trio.BrokenResourceError):
                await wire.send_all(encode(Bye(NAME_CONFLICT, twin)))
            raise PeerRefused(twin)
        section = self.section
        link = Link(
            wire,
            Peer(self.name, serves_max=section.streams_max),
            {key: _of(server, peer) for key, server in self.serves.items()},
            heartbeat=Heartbeat(section.heartbeat_s, section.silent_s, section.stalled_s),
            heartbeat_task=self.heartbeat_task,
            acknowledged_s=wire.acknowledged_s,
        )
        link.on_stalled = partial(self._stalled, peer, link)
        one = _Carried(link, dialer, incarnation)
        link.on_announcement = partial(self._told, peer, one)

        async def carry(nursery: trio.Nursery) -> None:
            nursery.start_soon(self._end_in_time, peer, one)
            try:
                with one.scope:
                    await link.run(task_status=OnStarted(partial(self._linked, peer, one)))
            finally:
                self._unlinked(peer, one)

        if dialer == self.name:
            self._dialed.add(peer)
        try:
            await websocket.run_in_nursery(carry)
        except PeerLost as error:
            if link.received_bye is None or link.received_bye.code != NAME_CONFLICT:
                raise
            said, again_s = printable(link.received_bye.detail), 2 * section.retry_max_s + section.handshake_s
            self.directory.name_conflicts[peer] = said, trio.current_time() + again_s
            raise PeerRefused(f"node {peer} refuses this one: {said}") from error
        finally:
            if dialer == self.name:
                self._dialed.discard(peer)

    def _twin(self, peer: str, incarnation: Incarnation) -> str | None:
        """Say why another process of a node's name is not linked: the one that is was heard a moment ago.

        One that is silent gives way at once: it may have ended where nobody saw it.
        """
        before = self._carried.get(peer)
        if before is None or before.incarnation == incarnation or before.link.silent_s >= self.section.silent_s:
            return None
        first, second = _process(before.incarnation), _process(incarnation)
        return f"two processes call themselves {peer}: {first} is linked to {self.name}, so {second} is not"

    async def _end_in_time(self, peer: str, one: _Carried) -> None:
        """Let nobody be asked over a link that is lost, while those who answered over it still let go."""
        await one.link.wait_lost()
        self._unlinked(peer, one)

    async def _attend(self, wire: websocket.WebSocketTransport) -> None:
        """Answer an operator until it leaves: it is no node, so it is told of nothing and nobody is told of it."""
        if self._operators >= OPERATORS_MAX:
            raise PeerRefused(f"{self._operators} operators are here already")
        controls = {of: server for of, server in self.serves.items() if not of[0]}
        heart = Heartbeat(self.section.heartbeat_s, self.section.silent_s)
        link = Link(wire, Peer(self.name, serves_max=OPERATOR_STREAMS_MAX), controls, heartbeat=heart)
        self._operators += 1
        try:
            await link.run()
        except PeerLost:
            pass  # it has what it asked for
        finally:
            self._operators -= 1

    def _linked(self, peer: str, one: _Carried) -> None:
        """Note a link over which the other end has said Hello; of two to one node the newer stays.

        But of two that were dialed from both ends at once, either end keeps the one that the first by name has dialed.
        """
        one.link.count_into(self.traffic[peer])
        before = self._carried.get(peer)
        if before is not None and before.dialer != one.dialer == max(self.name, peer):
            one.scope.cancel(reason="there is another link to the node")
            return
        if self._twin(peer, one.incarnation) is not None:  # linked in the moment since it greeted: it is told next time
            one.scope.cancel(reason="another process has the node's name")
            return
        self._carried[peer] = one
        self.directory.name_conflicts.pop(peer, None)
        if before is not None:  # whoever dials again knows better than this end what is lost
            why = "the node has come back by another link"
            log.info(
                "a link was replaced", extra={"peer": peer, "reason": why, "incarnation": _process(one.incarnation)}
            )
            before.link.lost_error = LinkReplaced
            before.gone.set()
            before.scope.cancel(reason=why)
        self._nodes.linked(peer)
        self._set_pace()
        self.directory.linked(peer, one.link)
        self.teller.begin(peer, one.link)

    def _unlinked(self, peer: str, one: _Carried) -> None:
        if self._carried.get(peer) is one:
            del self._carried[peer]
            self._set_pace()
        one.gone.set()
        self.teller.end(peer, one.link)
        self.directory.unlinked(peer, one.link)

    def _stalled(self, peer: str, link: Link) -> None:
        """Let nobody choose the workers of a node that stands still, until it is heard again."""
        said = "a node stands still" if link.stalled else "a node that stood still is heard again"
        log.log(logging.WARNING if link.stalled else logging.INFO, said, extra={"peer": peer})
        self.directory.notify()
        self.directory.reroute_queued()  # who is heard again may do what waits here for an engine that is down

    def _set_pace(self) -> None:
        """Let all others together tell this node of their loads no more often than it can hear, however many they are.

        Their number is rounded, so that a node that comes or goes seldom changes it.
        """
        many = 1 << max(0, len(self._carried) - 1).bit_length()
        pace_s = min(TELL_S_MAX, many / self.section.announcements_max)
        self.directory.announce_s = pace_s if self.directory.routes and pace_s > self.section.tell_s else 0.0

    def _told(self, peer: str, one: _Carried, message: Message) -> None:
        if not isinstance(message, NodeState | LoadUpdate):
            raise PeerViolation(f"a {type(message).__name__} was told, which says nothing of a node")
        if self._carried.get(peer) is not one:
            return
        if isinstance(message, LoadUpdate):
            self.directory.merge_loads(peer, check_loads(message))
            return
        before = peer in self.directory.subscribers
        self.directory.merge_state(peer, check(message))
        if before != (peer in self.directory.subscribers):
            self.teller.begin(peer, one.link)


def _found(address: str | None) -> bool:
    """Whether a node can be found at an address; everywhere is nowhere."""
    return address is not None and websocket.Endpoint.read(address).host not in WILDCARD_HOSTS


def _of(server: object, peer: str) -> Askable[Message, Message, Message]:
    """Return what is asked here as one node asks it, which is counted apart."""
    return cast(
        "Askable[Message, Message, Message]", server.for_node(peer) if isinstance(server, GuardedWorker) else server
    )


def _process(incarnation: Incarnation) -> str:
    """Return an incarnation as a log shows it."""
    return f"{incarnation.run[:12]}, started {formatdate(incarnation.started_at, usegmt=True)}"


def _host(stream: trio.SocketStream) -> str:
    """Return where a connection comes from."""
    try:
        return str(stream.socket.getpeername()[0])
    except OSError:
        return "somebody"
