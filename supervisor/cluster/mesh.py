"""The mesh: one link between every two nodes that need each other, dialed again whenever it is lost.

Of two nodes that can find each other the first by name dials, so that they do not open two links at once. A node that
joins dials all the same, because others may know it by an old address. Where there are two links nevertheless, both
ends keep the same one: the newer, or of two that were dialed at once the one that the first node by name has dialed.

Who connects is nobody until it has proved its name. Until then it has little time and few bytes, and the oldest such
connection is closed for a new carried, so that strangers cannot keep nodes out. A second process with a node's name is
refused as long as the first one is heard: two processes that answer by turns would be worse than one that is missing.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import cast

import trio
from attrs import define, field

from protocol.cluster import OPERATOR_PREFIX, TELL_S_MAX, LoadUpdate, Neighbour, NodeState, check_loads, check_state
from protocol.errors import ActorError, LinkReplaced, PeerLost, PeerRefused, PeerViolation, StartFailed
from protocol.frames import Bye, encode
from protocol.greeting import Greeter, Incarnation, Role
from protocol.kind import Message
from protocol.peer import Peer
from supervisor.cluster.announcements import Announcer
from supervisor.cluster.carried_link import CarriedLink, MeshStatistics, process_name
from supervisor.cluster.directory import FORGET_S, Directory
from supervisor.cluster.workers import GuardedWorker
from supervisor.config.load import LOOPBACK_HOSTS, WILDCARD_HOSTS, ClusterSection
from supervisor.links import websocket
from supervisor.links.endpoint import Endpoint
from supervisor.links.heartbeat import Heartbeat, HeartbeatTask
from supervisor.links.link import Link
from supervisor.links.link_log import LinkLog
from supervisor.links.serving import Service, Services
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
FORGETS_S = FORGET_S / 10  # between two looks for nodes to forget


@define(eq=False)
class Mesh:
    """The links of one node to all others."""

    name: str
    section: ClusterSection
    directory: Directory
    services: Services
    listen: Endpoint | None
    secret: bytes = field(repr=False)  # empty: any node may link
    tls: LinkTls | None  # None: plain
    new_nonce: Callable[[], bytes]
    chance: RandomSource
    join: Sequence[Endpoint] = ()
    dial: websocket.Dial = websocket.dial
    accept: websocket.Accept = websocket.accept
    incarnation: Incarnation = Incarnation()
    host: str = ""  # where other nodes find this one if it listens at every address
    port: int | None = None  # once it listens
    reserve: Reserve = field(factory=Reserve)  # of descriptors, which no connection takes
    announcer: Announcer = field()
    heartbeat_task: HeartbeatTask = field(factory=HeartbeatTask)
    traffic: defaultdict[str, Traffic] = field(factory=lambda: defaultdict(Traffic))  # by node, over all its links
    node_log: LinkLog = field(factory=LinkLog)
    _other_log: LinkLog = field(factory=LinkLog)  # of operators and of who has not proved a name
    _dialing: set[str] = field(factory=set)  # nodes that have a task that dials them
    _dialed: set[str] = field(factory=set)  # nodes to which this one has dialed the link
    _carried: dict[str, CarriedLink] = field(factory=dict)
    _unauthenticated: UnauthenticatedConnections[trio.SocketStream] = field(factory=UnauthenticatedConnections)
    _operators: int = 0

    @announcer.default
    def _new_announcer(self) -> Announcer:
        return Announcer(self.directory)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the links until cancelled; `started()` means that other nodes can dial this one."""
        self._dialing.clear()  # what an earlier run did has ended with it
        async with trio.open_nursery() as nursery:
            if self.listen is not None:
                await self._listen(nursery, self.listen)
            nursery.start_soon(self._forget)
            nursery.start_soon(self.heartbeat_task.run)
            nursery.start_soon(self.announcer.run, lambda: self.section.tell_s)
            task_status.started()
            for at in self.join:
                nursery.start_soon(self._keep, None, at)
            while True:
                self._dial_new(nursery)
                await self.directory.wait_changed()

    def statistics(self) -> MeshStatistics:
        """Return what the mesh holds at this moment."""
        return MeshStatistics(
            dialers={peer: carried.dialer for peer, carried in self._carried.items()},
            dialing=frozenset(self._dialing),
            dialed=frozenset(self._dialed),
            unauthenticated=len(self._unauthenticated),
            operators=self._operators,
        )

    def send_bye(self, detail: str) -> None:
        """Tell every node that this one ends their link, and why."""
        for node in self.directory.nodes.values():
            if node.link is not None:
                node.link.send_bye("draining", detail)

    # Who dials ---------------------------------------------------------------------------

    def _dial_new(self, nursery: trio.Nursery) -> None:
        """Begin to dial the nodes that have become known and that are this one's to dial."""
        everybody = self.directory.address is None or bool(self.join)
        for name, address in self.directory.addresses():
            ours = name not in self._dialing and (everybody or self.name < name)
            if ours and _is_dialable(address) and self.directory.should_link(name):
                self._dialing.add(name)
                nursery.start_soon(self._keep, name, None)

    async def _keep(self, name: str | None, join: Endpoint | None) -> None:
        """Dial a node, or an address to join at, whenever there is no link to it, with a wait that grows."""
        peer, failures, met_at = name, 0, inf

        async def talk(wire: websocket.WebSocketTransport) -> None:
            nonlocal peer, met_at
            (peer, incarnation), met_at = await self._greet("dials", name, wire), trio.current_time()
            if peer.startswith(OPERATOR_PREFIX):
                raise PeerRefused(f"{at} greets as an operator, who is no node")
            if peer not in self._dialed or self._name_conflict(peer, incarnation) is not None:
                await self._carry(peer, wire, self.name, incarnation)

        while True:
            while (carried := self._carried.get(peer or "")) is not None:
                await carried.gone.wait()
            if (at := join or self._address(name)) is None:
                self._dialing.discard(name or "")  # forgotten; `_dial_new` begins again if it is named again
                return
            section = self.section  # a reload replaces it
            failures, met_at = failures + 1, inf
            try:
                await self.dial(at, self.tls.dials if self.tls else None, section.handshake_s, talk)
            except ActorError as error:
                self.node_log.failed(name or str(at), error)
            except Exception:
                log.exception("a bug ended a link")
            if trio.current_time() - met_at > section.silent_s:  # it was a link, and a good one
                failures = 1
            backoff = Backoff(min_s=section.retry_min_s, max_s=section.retry_max_s, jitter=1.0)
            await trio.sleep(backoff.wait_s(failures, self.chance.random()))

    def _address(self, name: str | None) -> Endpoint | None:
        address = self.directory.node(name or "").address
        return None if address is None else Endpoint.read(address)

    async def _forget(self) -> None:
        """Forget the nodes that nobody names any more, and the traffic with them."""
        while True:
            await trio.sleep(FORGETS_S)
            for name in self.directory.forget():
                self.traffic.pop(name, None)

    async def _listen(self, nursery: trio.Nursery, at: Endpoint) -> None:
        try:
            listeners = await trio.open_tcp_listeners(at.port, host=at.host)
        except OSError as error:
            raise StartFailed(f"node {self.name} cannot listen on {at}: {error.strerror or error}") from error
        self.port = int(listeners[0].socket.getsockname()[1])
        everywhere = at.host in WILDCARD_HOSTS
        # A node that listens at every address of a host called localhost has no address for others: it dials them.
        nowhere = everywhere and self.host in (*WILDCARD_HOSTS, *LOOPBACK_HOSTS)
        self.directory.address = None if nowhere else str(Endpoint(self.host if everywhere else at.host, self.port))
        guarded = [GuardedListener(listener, self.reserve) for listener in listeners]
        nursery.start_soon(partial(trio.serve_listeners, self._accepted, guarded))

    async def _accepted(self, stream: trio.SocketStream) -> None:
        """Carry the link of a node that has dialed; whatever is wrong with it ends no other."""
        name, host = "", _host(stream)

        async def talk(wire: websocket.WebSocketTransport) -> None:
            nonlocal name
            name, incarnation = await self._greet("listens", None, wire)
            self._unauthenticated.remove(stream)
            if name.startswith(OPERATOR_PREFIX):
                await self._serve_operator(wire)
            else:
                await self._carry(name, wire, name, incarnation)

        try:
            with trio.CancelScope() as scope:
                self._unauthenticated.add(stream, address_of(stream), scope)
                self._make_room()
                await self.accept(stream, self.tls.listens if self.tls else None, self.section.handshake_s, talk)
        except ActorError as error:
            is_operator = name.startswith(OPERATOR_PREFIX)
            links = self.node_log if name and not is_operator else self._other_log
            links.failed("an operator" if is_operator else name or host, error)
        except Exception:
            log.exception("a bug ended a link")
        finally:
            self._unauthenticated.remove(stream)

    def _make_room(self) -> None:
        """Close unauthenticated connections if there are too many: a node needs a moment only to prove its name."""
        connections, limit = self._unauthenticated, self.section.handshakes_max
        while len(connections) > limit and (oldest := connections.close_oldest_of_busiest_address()) is not None:
            reason = f"more than {limit} (handshakes_max) that do not say who they are"
            self._other_log.failed(_host(oldest), PeerRefused(reason))

    # One link ----------------------------------------------------------------------------

    async def _greet(
        self, role: Role, expects: str | None, wire: websocket.WebSocketTransport
    ) -> tuple[str, Incarnation]:
        """Return the name that the other end has proved, and which process of that name it is."""
        nonce, incarnation = self.new_nonce(), self.incarnation
        names = wire.certificate_names() if self.section.verifies_node_names else None
        greeter = Greeter(role, self.section.name, self.name, self.secret, nonce, expects, incarnation, names)
        return await websocket.greet(wire, greeter, self.section.handshake_s), greeter.peer_incarnation

    async def _carry(
        self, peer: str, wire: websocket.WebSocketTransport, dialer: str, incarnation: Incarnation = ANY
    ) -> None:
        """Carry a link until it is lost, or another to the same node takes its place.

        Raises `PeerLost`, `PeerViolation` and, for a name that no node has or that another process has, `PeerRefused`.
        """
        check_state(NodeState(neighbours=(Neighbour(peer, None),)))
        if not self.directory.has_room_for(peer):
            raise PeerRefused(f"node {peer} was refused: no more nodes can be known here")
        if (conflict := self._name_conflict(peer, incarnation)) is not None:
            with suppress(trio.BrokenResourceError):
                await wire.send_all(encode(Bye(NAME_CONFLICT, conflict)))
            raise PeerRefused(conflict)
        section = self.section
        link = Link(
            wire,
            Peer(self.name, serves_max=section.streams_max),
            {key: _service_for(service, peer) for key, service in self.services.items()},
            heartbeat=Heartbeat(section.heartbeat_s, section.silent_s, section.stalled_s),
            heartbeat_task=self.heartbeat_task,
            acknowledged_s=wire.acknowledged_s,
        )
        link.on_stalled = partial(self._on_stalled, peer, link)
        carried = CarriedLink(link, dialer, incarnation)
        link.on_announcement = partial(self._on_announcement, peer, carried)

        async def carry(nursery: trio.Nursery) -> None:
            nursery.start_soon(self._unlink_when_lost, peer, carried)
            try:
                with carried.scope:
                    await link.run(task_status=OnStarted(partial(self._linked, peer, carried)))
            finally:
                self._unlinked(peer, carried)

        if dialer == self.name:
            self._dialed.add(peer)
        try:
            await websocket.run_in_nursery(carry)
        except PeerLost as error:
            if link.received_bye is None or link.received_bye.code != NAME_CONFLICT:
                raise
            detail, again_s = printable(link.received_bye.detail), 2 * section.retry_max_s + section.handshake_s
            self.directory.name_conflicts[peer] = detail, trio.current_time() + again_s
            raise PeerRefused(f"node {peer} refuses this one: {detail}") from error
        finally:
            if dialer == self.name:
                self._dialed.discard(peer)

    def _name_conflict(self, peer: str, incarnation: Incarnation) -> str | None:
        """Return why another process of a node's name is refused: the linked one was heard a moment ago.

        A linked one that is silent gives way at once, since it may have ended unnoticed.
        """
        before = self._carried.get(peer)
        if before is None or before.incarnation == incarnation or before.link.silent_s >= self.section.silent_s:
            return None
        first, second = process_name(before.incarnation), process_name(incarnation)
        return f"two processes call themselves {peer}: {first} is linked to {self.name}, so {second} is not"

    async def _unlink_when_lost(self, peer: str, carried: CarriedLink) -> None:
        """Stop asking over a link that is lost, while the calls that it served still release what they hold."""
        await carried.link.wait_lost()
        self._unlinked(peer, carried)

    async def _serve_operator(self, wire: websocket.WebSocketTransport) -> None:
        """Answer an operator until it leaves: it is no node, so nothing is announced to it, and it to nobody."""
        if self._operators >= OPERATORS_MAX:
            raise PeerRefused(f"{self._operators} operators are here already")
        controls = {key: service for key, service in self.services.items() if not key[0]}
        heartbeat = Heartbeat(self.section.heartbeat_s, self.section.silent_s)
        link = Link(wire, Peer(self.name, serves_max=OPERATOR_STREAMS_MAX), controls, heartbeat=heartbeat)
        self._operators += 1
        try:
            await link.run()
        except PeerLost:
            pass  # it has what it asked for
        finally:
            self._operators -= 1

    def _linked(self, peer: str, carried: CarriedLink) -> None:
        """Take a link over which the other end's Hello has arrived, and end another one to the same node."""
        carried.link.count_into(self.traffic[peer])
        before = self._carried.get(peer)
        if before is not None and before.dialer != carried.dialer == max(self.name, peer):
            carried.scope.cancel(reason="there is another link to the node")
            return
        if self._name_conflict(peer, carried.incarnation) is not None:
            carried.scope.cancel(reason="another process has the node's name")
            return
        self._carried[peer] = carried
        self.directory.name_conflicts.pop(peer, None)
        if before is not None:  # the node that dials again knows better than this one what is lost
            why, process = "the node has come back by another link", process_name(carried.incarnation)
            log.info("a link was replaced", extra={"peer": peer, "reason": why, "incarnation": process})
            before.link.lost_error = LinkReplaced
            before.gone.set()
            before.scope.cancel(reason=why)
        self.node_log.linked(peer)
        self._set_announce_interval()
        self.directory.linked(peer, carried.link)
        self.announcer.add(peer, carried.link)

    def _unlinked(self, peer: str, carried: CarriedLink) -> None:
        if self._carried.get(peer) is carried:
            del self._carried[peer]
            self._set_announce_interval()
        carried.gone.set()
        self.announcer.remove(peer, carried.link)
        self.directory.unlinked(peer, carried.link)

    def _on_stalled(self, peer: str, link: Link) -> None:
        """Let nobody choose the workers of a node that stands still, until it is heard again."""
        message = "a node stands still" if link.stalled else "a node that stood still is heard again"
        log.log(logging.WARNING if link.stalled else logging.INFO, message, extra={"peer": peer})
        self.directory.notify()
        self.directory.reroute_queued()  # it may serve what waits here for an engine that is down

    def _set_announce_interval(self) -> None:
        """Ask the others to announce loads so seldom that all together stay below `announcements_max` a second.

        Their number is rounded up to a power of two, so that a node that comes or goes seldom changes the interval.
        """
        nodes = 1 << max(0, len(self._carried) - 1).bit_length()
        interval_s = min(TELL_S_MAX, nodes / self.section.announcements_max)
        self.directory.announce_s = interval_s if self.directory.routes and interval_s > self.section.tell_s else 0.0

    def _on_announcement(self, peer: str, carried: CarriedLink, message: Message) -> None:
        if not isinstance(message, NodeState | LoadUpdate):
            raise PeerViolation(f"a {type(message).__name__} was announced, which says nothing of a node")
        if self._carried.get(peer) is not carried:
            return
        if isinstance(message, LoadUpdate):
            self.directory.merge_loads(peer, check_loads(message))
            return
        before = peer in self.directory.subscribers
        self.directory.merge_state(peer, check_state(message))
        if before != (peer in self.directory.subscribers):
            self.announcer.add(peer, carried.link)


def _is_dialable(address: str | None) -> bool:
    """Whether an address names one host, and not every address of some host."""
    return address is not None and Endpoint.read(address).host not in WILDCARD_HOSTS


def _service_for(service: object, peer: str) -> Service:
    """Return a service as one node asks it: workers count the requests of each node apart."""
    return cast("Service", service.for_node(peer) if isinstance(service, GuardedWorker) else service)


def _host(stream: trio.SocketStream) -> str:
    """Return the address that a connection comes from."""
    try:
        return str(stream.socket.getpeername()[0])
    except OSError:
        return "somebody"
