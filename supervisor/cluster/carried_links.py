"""The running links to other nodes: the choice of the one that counts, and the changes with it.

Two nodes may dial each other at once, a node may come back before the loss of its old link has been noticed, and a
second process may run under a node's name by mistake. Both ends must then keep the same link without asking each other,
so they decide by common facts: the newer link counts, or of two dialed at once the one dialed by the first node by
name. A second process is refused as long as the first one is alive: two processes in turns would be worse than a
missing one. The second may run on without a link, so it is sent the reason first.

Only the link that counts reaches the directory. Messages over another one are ignored.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from email.utils import formatdate
from functools import partial
from typing import cast

import trio
from attrs import Factory, define, field

from protocol.errors import LinkReplaced, PeerLost, PeerRefused, PeerViolation
from protocol.link.frames import Bye, encode
from protocol.link.greeting import Incarnation
from protocol.link.peer import Peer
from protocol.messages.cluster import ANNOUNCE_S_MAX, LoadUpdate, Neighbour, NodeState, check_loads, check_state
from protocol.messages.kind import Message
from supervisor.cluster.announcements import Announcer
from supervisor.cluster.directory import Directory
from supervisor.cluster.engine_service import EngineService
from supervisor.cluster.link_settings import LinkSettings
from supervisor.links import websocket
from supervisor.links.heartbeat import Heartbeat, HeartbeatTask
from supervisor.links.link import Link
from supervisor.links.link_log import LinkLog
from supervisor.links.serving import Service, Services
from supervisor.links.tensor_road import Attachments
from supervisor.links.traffic import Traffic
from supervisor.printable import printable
from supervisor.supervision.supervise import OnStarted
from supervisor.tensors.transfer_road import TransferMemory, TransferRoad

log = logging.getLogger(__name__)

NAME_CONFLICT = "twin"  # the code of a Bye to a second process of one name


@define(eq=False)
class CarriedLink:
    """A running link, the node that has dialed it, and the incarnation of the other end."""

    link: Link
    dialer: str
    incarnation: Incarnation
    gone: trio.Event = field(factory=trio.Event)  # it no longer counts
    scope: trio.CancelScope = field(factory=trio.CancelScope)


@define(eq=False)
class CarriedLinks:
    """The links of a node to others, from the greeting to the end."""

    name: str
    section: LinkSettings
    directory: Directory
    services: Services
    traffic: defaultdict[str, Traffic]  # by node, over all its links
    link_log: LinkLog
    memory: TransferMemory | None = None  # for tensors that other nodes read
    announcer: Announcer = field(default=Factory(lambda self: Announcer(self.directory), takes_self=True))
    heartbeat_task: HeartbeatTask = field(factory=HeartbeatTask)
    dialed: set[str] = field(factory=set)  # the nodes to which this one has dialed the link
    _carried: dict[str, CarriedLink] = field(factory=dict)  # by node, the link that counts

    @property
    def dialers(self) -> Mapping[str, str]:
        """The dialers of the links that count, by the node at the other end."""
        return {peer: carried.dialer for peer, carried in self._carried.items()}

    async def wait_gone(self, peer: str) -> None:
        """Wait until there is no link to a node."""
        while (carried := self._carried.get(peer)) is not None:
            await carried.gone.wait()

    def name_conflict(self, peer: str, incarnation: Incarnation) -> str | None:
        """Return why another process of a node's name is refused, None if it is not.

        A linked process that has been silent gives way at once, since it may have ended unnoticed.
        """
        before = self._carried.get(peer)
        if before is None or before.incarnation == incarnation or before.link.silent_s >= self.section.silent_s:
            return None
        first, second = _process_name(before.incarnation), _process_name(incarnation)
        return f"two processes call themselves {peer}: {first} is linked to {self.name}, so {second} is not"

    async def carry(
        self, peer: str, transport: websocket.WebSocketTransport, dialer: str, incarnation: Incarnation
    ) -> None:
        """Carry a link until it is lost, or another link to the same node replaces it.

        Raises `PeerLost`, `PeerViolation`, and `PeerRefused` for an impossible name or another process's name.
        """
        check_state(NodeState(neighbours=(Neighbour(peer, None),)))
        if not self.directory.records.has_room_for(peer):
            raise PeerRefused(f"node {peer} was refused: no more nodes can be known here")
        if (conflict := self.name_conflict(peer, incarnation)) is not None:
            with suppress(trio.BrokenResourceError):
                await transport.send_all(encode(Bye(NAME_CONFLICT, conflict)))
            raise PeerRefused(conflict)
        section = self.section
        road = Attachments() if self.memory is None else TransferRoad(self.memory)
        link = Link(
            transport,
            Peer(
                self.name,
                serves_max=section.streams_max,
                attached_bytes_max=section.attached_bytes_max,
                memory=None if road.reader is None else road.reader.offered,
            ),
            {key: _service_for(service, peer) for key, service in self.services.items()},
            heartbeat=Heartbeat(section.heartbeat_s, section.silent_s, section.stalled_s),
            heartbeat_task=self.heartbeat_task,
            acknowledged_s=transport.acknowledged_s,
            road=road,
        )
        link.on_stalled = partial(self._on_stalled, peer, link)
        carried = CarriedLink(link, dialer, incarnation)
        link.on_announcement = partial(self._on_announcement, peer, carried)

        async def run(nursery: trio.Nursery) -> None:
            nursery.start_soon(self._unlink_when_lost, peer, carried)
            try:
                with carried.scope:
                    await link.run(task_status=OnStarted(partial(self._linked, peer, carried)))
            finally:
                self._unlinked(peer, carried)

        if dialer == self.name:
            self.dialed.add(peer)
        try:
            await websocket.run_in_nursery(run)
        except PeerLost as error:
            if link.received_bye is None or link.received_bye.code != NAME_CONFLICT:
                raise
            detail, again_s = printable(link.received_bye.detail), 2 * section.retry_max_s + section.handshake_s
            self.directory.name_conflicts[peer] = detail, trio.current_time() + again_s
            raise PeerRefused(f"node {peer} refuses this one: {detail}") from error
        finally:
            if dialer == self.name:
                self.dialed.discard(peer)

    async def _unlink_when_lost(self, peer: str, carried: CarriedLink) -> None:
        """Ask nothing more over a lost link, while its served calls still release their slots and memory."""
        await carried.link.wait_lost()
        self._unlinked(peer, carried)

    def _linked(self, peer: str, carried: CarriedLink) -> None:
        """Count a link over which the other end's Hello has arrived, and end an older one to the same node."""
        carried.link.count_into(self.traffic[peer])
        before = self._carried.get(peer)
        if before is not None and before.dialer != carried.dialer == max(self.name, peer):
            carried.scope.cancel(reason="there is another link to the node")
            return
        if self.name_conflict(peer, carried.incarnation) is not None:
            carried.scope.cancel(reason="another process has the node's name")
            return
        self._carried[peer] = carried
        self.directory.name_conflicts.pop(peer, None)
        if before is not None:  # the node that dials again knows better than this one what is lost
            reason, process = "the node has come back by another link", _process_name(carried.incarnation)
            log.info("a link was replaced", extra={"peer": peer, "reason": reason, "incarnation": process})
            before.link.lost_error = LinkReplaced
            before.gone.set()
            before.scope.cancel(reason=reason)
        self.link_log.linked(peer)
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
        """Route nothing to a node whose process stands still, until something arrives from it again."""
        message = "a node stands still" if link.stalled else "a node that stood still is heard again"
        log.log(logging.WARNING if link.stalled else logging.INFO, message, extra={"peer": peer})
        self.directory.notify()
        self.directory.reroute_queued()  # it may serve what waits here for an engine that is down

    def _set_announce_interval(self) -> None:
        """Ask the others to announce loads so seldom that all together stay below `announcements_max` a second.

        Their number is rounded up to a power of two, so that the interval seldom changes with a node.
        """
        section = self.section
        nodes = 1 << max(0, len(self._carried) - 1).bit_length()
        interval_s = min(ANNOUNCE_S_MAX, nodes / section.announcements_max)
        self.directory.announce_s = interval_s if self.directory.routes and interval_s > section.announce_s else 0.0

    def _on_announcement(self, peer: str, carried: CarriedLink, message: Message) -> None:
        """Merge a node's announcement over the link that counts; raises `PeerViolation` for another message."""
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


def _service_for(service: object, peer: str) -> Service:
    """Return a service as one node asks it: workers count the requests of each node apart."""
    return cast("Service", service.for_node(peer) if isinstance(service, EngineService) else service)


def _process_name(incarnation: Incarnation) -> str:
    """Return an incarnation as a log shows it."""
    return f"{incarnation.run[:12]}, started {formatdate(incarnation.started_at, usegmt=True)}"
