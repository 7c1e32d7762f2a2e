"""The mesh: one link between every two nodes that need each other, dialed again whenever it is lost.

Between two nodes with addresses the first by name dials, to avoid two links at once. A node that joins dials all the
same, because others may know it by an old address. `carried_links` decides which link counts where there are two all
the same.

Anybody can connect. Until a connection has proved a name it has little time and few bytes, and where there are too many
such connections the oldest one is closed, so that they cannot keep nodes out. No error of one connection may end
another one, or this file's tasks.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf

import trio
from attrs import define, field, frozen

from protocol.errors import ActorError, PeerLost, PeerRefused, StartFailed
from protocol.link.greeting import Greeter, Incarnation, Role
from protocol.link.peer import Peer
from protocol.messages.cluster import OPERATOR_PREFIX
from supervisor.cluster.carried_links import CarriedLinks
from supervisor.cluster.directory import Directory
from supervisor.cluster.link_settings import LinkSettings
from supervisor.cluster.node_records import FORGET_S
from supervisor.config.sections import LOOPBACK_HOSTS, WILDCARD_HOSTS
from supervisor.links import websocket
from supervisor.links.endpoint import Endpoint
from supervisor.links.heartbeat import Heartbeat
from supervisor.links.link import Link
from supervisor.links.link_log import LinkLog
from supervisor.links.serving import Services
from supervisor.links.tls import LinkTls
from supervisor.links.traffic import Traffic
from supervisor.sockets.descriptor_reserve import DescriptorReserve, GuardedListener
from supervisor.sockets.unauthenticated import UnauthenticatedConnections, address_of
from supervisor.supervision.supervise import RandomSource
from supervisor.supervision.tree import Backoff
from supervisor.tensors.transfer_road import TransferMemory

log = logging.getLogger(__name__)

OPERATORS_MAX = 16  # at a time: people are one or two, and a program can try again
OPERATOR_STREAMS_MAX = 4
RUMOUR_DIALS_MAX = 16  # at a time, to nodes that only others have named: a name may be a lie, and a dial takes seconds
FORGETS_S = FORGET_S / 10  # between two searches for nodes to forget


@frozen
class MeshStatistics:
    """Counts of what a mesh holds at this moment."""

    dialers: Mapping[str, str]  # by the node that a link leads to, the node that has dialed it
    dialing: frozenset[str]  # the nodes that this one dials whenever there is no link to them
    dialed: frozenset[str]  # the nodes to which this one has dialed the link
    unauthenticated: int  # connections that have not proved a name yet
    operators: int


@define(eq=False)
class _DialTurn:
    """A permit to dial a discovered (not configured) node; released when the greeting ends."""

    dials: trio.Semaphore
    has_begun: bool = False

    async def begin(self) -> None:
        """Wait until few enough of them dial."""
        await self.dials.acquire()
        self.has_begun = True

    def end(self) -> None:
        """Let the next one dial; without effect on a turn that has not begun."""
        if self.has_begun:
            self.has_begun = False
            self.dials.release()


@define(eq=False)
class Mesh:
    """The links of one node to all others."""

    name: str
    section: LinkSettings
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
    reserve: DescriptorReserve = field(factory=DescriptorReserve)  # of descriptors, which no connection takes
    traffic: defaultdict[str, Traffic] = field(factory=lambda: defaultdict(Traffic))  # by node, over all its links
    node_log: LinkLog = field(factory=LinkLog)
    memory: TransferMemory | None = None  # for tensors that other nodes read; None: all are attached
    carried: CarriedLinks = field()
    _other_log: LinkLog = field(factory=LinkLog)  # of operators, and of connections that have proved no name
    _dialing: set[str] = field(factory=set)  # the nodes for which a task runs that dials them
    _unauthenticated: UnauthenticatedConnections[trio.SocketStream] = field(factory=UnauthenticatedConnections)
    _operators: int = 0
    _rumour_dials: trio.Semaphore = field(factory=lambda: trio.Semaphore(RUMOUR_DIALS_MAX))

    @carried.default
    def _new_carried(self) -> CarriedLinks:
        return CarriedLinks(
            self.name, self.section, self.directory, self.services, self.traffic, self.node_log, self.memory
        )

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the links until cancelled; `started()` means that other nodes can dial this one."""
        self._dialing.clear()  # the tasks of an earlier run have ended with it
        async with trio.open_nursery() as nursery:
            if self.memory is not None:
                await nursery.start(self.memory.run)
            if self.listen is not None:
                await self._listen(nursery, self.listen)
            nursery.start_soon(self._forget)
            nursery.start_soon(self.carried.heartbeat_task.run)
            nursery.start_soon(self.carried.announcer.run, lambda: self.section.announce_s)
            task_status.started()
            for endpoint in self.join:
                nursery.start_soon(self.keep_linked, None, endpoint)
            while True:
                self._dial_new(nursery)
                await self.directory.wait_changed()

    def statistics(self) -> MeshStatistics:
        """Return what the mesh holds at this moment."""
        return MeshStatistics(
            dialers=self.carried.dialers,
            dialing=frozenset(self._dialing),
            dialed=frozenset(self.carried.dialed),
            unauthenticated=len(self._unauthenticated),
            operators=self._operators,
        )

    def send_bye(self, detail: str) -> None:
        """Announce to every node that this one will end their link, and why."""
        for node in self.directory.nodes.values():
            if node.link is not None:
                node.link.send_bye("draining", detail)

    # Who dials ---------------------------------------------------------------------------

    def _dial_new(self, nursery: trio.Nursery) -> None:
        """Start to dial the directory's new nodes, if this node is the dialer."""
        dials_all = self.directory.address is None or bool(self.join)
        for name, address in self.directory.addresses():
            is_due = name not in self._dialing and (dials_all or self.name < name)
            if is_due and _is_dialable(address) and self.directory.should_link(name):
                self._dialing.add(name)
                nursery.start_soon(self.keep_linked, name, None)

    async def keep_linked(self, name: str | None, join: Endpoint | None) -> None:
        """Dial a node, or an address to join at, whenever there is no link to it, with a wait that grows."""
        peer, failures, greeted_at, turn = name, 0, inf, _DialTurn(self._rumour_dials)

        async def handle(transport: websocket.WebSocketTransport) -> None:
            nonlocal peer, greeted_at
            (peer, incarnation), greeted_at = await self.greet("dials", name, transport), trio.current_time()
            turn.end()
            if peer.startswith(OPERATOR_PREFIX):
                raise PeerRefused(f"{endpoint} greets as an operator, who is no node")
            if peer not in self.carried.dialed or self.carried.name_conflict(peer, incarnation) is not None:
                await self.carried.carry(peer, transport, self.name, incarnation)

        while True:
            await self.carried.wait_gone(peer or "")
            if (endpoint := join or self._endpoint(name)) is None:
                self._dialing.discard(name or "")  # forgotten; `_dial_new` begins again if it is named again
                return
            section = self.section
            failures, greeted_at = failures + 1, inf
            await self._dial_once(name, endpoint, turn, handle)
            if trio.current_time() - greeted_at > section.silent_s:  # the link was a good one
                failures = 1
            backoff = Backoff(min_s=section.retry_min_s, max_s=section.retry_max_s, jitter=1.0)
            await trio.sleep(backoff.wait_s(failures, self.chance.random()))

    async def _dial_once(
        self, name: str | None, endpoint: Endpoint, turn: _DialTurn, handle: websocket.ConnectionHandler
    ) -> None:
        """Dial, and log why the link has ended. A node that only others have named is dialed when it is its turn."""
        try:
            if name is not None and self.directory.records.is_rumour(name):
                await turn.begin()
                if self.directory.node(name).link is not None:  # it has dialed meanwhile
                    return
            await self.dial(endpoint, self.tls.dials if self.tls else None, self.section.handshake_s, handle)
        except ActorError as error:
            self.node_log.failed(name or str(endpoint), error)
        except Exception:
            log.exception("a bug ended a link")
        finally:
            turn.end()

    def _endpoint(self, name: str | None) -> Endpoint | None:
        address = self.directory.node(name or "").address
        return None if address is None else Endpoint.read(address)

    async def _forget(self) -> None:
        """Forget the nodes unnamed for `FORGET_S`, and the traffic with them."""
        while True:
            await trio.sleep(FORGETS_S)
            for name in await self.directory.records.forget():
                self.traffic.pop(name, None)

    # Who is accepted ---------------------------------------------------------------------

    async def _listen(self, nursery: trio.Nursery, listen: Endpoint) -> None:
        """Accept connections; raises `StartFailed` if the port cannot be had."""
        try:
            listeners = await trio.open_tcp_listeners(listen.port, host=listen.host or None)
        except OSError as error:
            raise StartFailed(f"node {self.name} cannot listen on {listen}: {error.strerror or error}") from error
        self.port = int(listeners[0].socket.getsockname()[1])
        is_wildcard = listen.host in WILDCARD_HOSTS
        # A node that listens at every address of a host called localhost has no address for others: it dials them.
        has_none = is_wildcard and self.host in (*WILDCARD_HOSTS, *LOOPBACK_HOSTS)
        host = self.host if is_wildcard else listen.host
        self.directory.address = None if has_none else str(Endpoint(host, self.port))
        guarded = [GuardedListener(listener, self.reserve) for listener in listeners]
        nursery.start_soon(partial(trio.serve_listeners, self._accepted, guarded))

    async def _accepted(self, stream: trio.SocketStream) -> None:
        """Serve a connection until it ends; its errors are logged, and end nothing else."""
        name, host = "", _host(stream)

        async def handle(transport: websocket.WebSocketTransport) -> None:
            nonlocal name
            name, incarnation = await self.greet("listens", None, transport)
            self._unauthenticated.remove(stream)
            if name.startswith(OPERATOR_PREFIX):
                await self.serve_operator(transport)
            else:
                await self.carried.carry(name, transport, name, incarnation)

        try:
            with trio.CancelScope() as scope:
                self._unauthenticated.add(stream, address_of(stream), scope)
                self._make_room()
                await self.accept(stream, self.tls.listens if self.tls else None, self.section.handshake_s, handle)
        except ActorError as error:
            is_operator = name.startswith(OPERATOR_PREFIX)
            link_log = self.node_log if name and not is_operator else self._other_log
            link_log.failed("an operator" if is_operator else name or host, error)
        except Exception:
            log.exception("a bug ended a link")
        finally:
            self._unauthenticated.remove(stream)

    def _make_room(self) -> None:
        """Close unauthenticated connections if there are too many: a node proves its name within a moment."""
        connections, limit = self._unauthenticated, self.section.handshakes_max
        while len(connections) > limit and (oldest := connections.close_oldest_of_busiest_address()) is not None:
            reason = f"more than {limit} that do not say who they are"
            self._other_log.failed(_host(oldest), PeerRefused(reason))

    async def greet(
        self, role: Role, expects: str | None, transport: websocket.WebSocketTransport
    ) -> tuple[str, Incarnation]:
        """Return the proved name and the incarnation of the other end."""
        nonce, incarnation = self.new_nonce(), self.incarnation
        names = transport.certificate_names() if self.section.verifies_node_names else None
        greeter = Greeter(role, self.section.name, self.name, self.secret, nonce, expects, incarnation, names)
        return await websocket.greet(transport, greeter, self.section.handshake_s), greeter.peer_incarnation

    async def serve_operator(self, transport: websocket.WebSocketTransport) -> None:
        """Serve an operator until it leaves; it is no node, so it appears in no directory and gets no announcements."""
        if self._operators >= OPERATORS_MAX:
            raise PeerRefused(f"{self._operators} operators are here already")
        controls = {key: service for key, service in self.services.items() if not key[0]}
        heartbeat = Heartbeat(self.section.heartbeat_s, self.section.silent_s)
        link = Link(transport, Peer(self.name, serves_max=OPERATOR_STREAMS_MAX), controls, heartbeat=heartbeat)
        self._operators += 1
        try:
            await link.run()
        except PeerLost:
            pass  # it has what it asked for
        finally:
            self._operators -= 1


def _is_dialable(address: str | None) -> bool:
    """Whether an address names one host, and not every address of some host."""
    return address is not None and Endpoint.read(address).host not in WILDCARD_HOSTS


def _host(stream: trio.SocketStream) -> str:
    """Return the address that a connection comes from."""
    try:
        return str(stream.socket.getpeername()[0])
    except OSError:
        return "somebody"
