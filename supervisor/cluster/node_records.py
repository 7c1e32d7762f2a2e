"""The other nodes as the directory records them: the latest state of each, its workers, its link and its address.

A node is recorded from cluster.toml, by a link to it, or from a third node's announcement. The last of these may be
wrong: such an address never replaces the one in cluster.toml or the node's own, and the number of such nodes is
limited, in all and for each announcing node: a false announcement must not keep out true ones.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import trio
from attrs import Factory, define, evolve, frozen

from protocol.messages.cluster import NEIGHBOURS_MAX, Neighbour, NodeState, Offer
from supervisor.cluster.cluster_worker import SiblingDirectory
from supervisor.cluster.workers import RemoteWorker
from supervisor.links.link import Link

log = logging.getLogger(__name__)

NODES_MAX = NEIGHBOURS_MAX - 1  # beside this one
WORKERS_MAX = 16_384  # of all other nodes together: each change of one orders all of its model again, in one turn
UNCONFIRMED_MAX = 256  # nodes that others have named and to which there is no link
# Of these, the nodes that one node alone has named and to which there has never been a link. A node that joins a larger
# cluster learns of the rest from those that it then has links to, since each of them names all nodes.
UNCONFIRMED_BY_NODE_MAX = 64
FORGET_S = 600.0  # after which a node is removed that neither cluster.toml nor any node with a link names


@frozen
class NodeSnapshot:
    """A node as other files read it: the state that it announced last, the link to it, its address."""

    state: NodeState = NodeState()
    link: Link | None = None
    address: str | None = None


UNKNOWN_NODE = NodeSnapshot()


@define(eq=False)
class NodeRecord:
    """The record of one other node."""

    name: str
    directory: SiblingDirectory
    state: NodeState = NodeState()
    link: Link | None = None
    address: str | None = None
    is_configured: bool = False  # it stands in cluster.toml
    address_is_configured: bool = False
    named_by: str | None = None  # the node that has named it first, None once there was a link to it
    left_out: bool = False  # some of the nodes that it names are not recorded, which has been logged
    workers_left_out: bool = False  # some of its workers are not recorded, which has been logged
    unnamed_since: float | None = None  # as `NodeRecords.forget` has found, on Trio's clock
    expected: dict[str, Offer] = Factory(dict)  # the workers that cluster.toml gives it
    routes: bool = False
    workers: dict[str, RemoteWorker] = Factory(dict)

    @property
    def snapshot(self) -> NodeSnapshot:
        """The node as other files read it."""
        return NodeSnapshot(self.state, self.link, self.address)

    @property
    def is_reachable(self) -> bool:
        """Whether its workers may be chosen: neither lost, nor stalled, nor draining."""
        link = self.link
        return link is not None and not (link.lost or link.stalled or self.state.draining)

    def connect(self, link: Link) -> None:
        """Let its workers be asked over this link, and over no other."""
        self.link = link
        self.named_by = None
        for worker in self.workers.values():
            worker.link = link

    def disconnect(self) -> None:
        """Keep the workers of cluster.toml as workers that cannot be asked, and remove all others."""
        self.link, self.left_out, self.workers_left_out = None, False, False
        offers = []
        for name, offer in self.expected.items():
            engine = self.workers[name].offer.engine if name in self.workers else None
            offers.append(evolve(offer, up=False, engine=engine or offer.engine))
        for worker in self.workers.values():
            worker.link = None
        self.merge(NodeState(tuple(offers)))

    def merge(self, state: NodeState) -> None:
        """Take over a state; its workers replace the last one's."""
        self.state = state
        for offer in state.offers:
            if (worker := self.workers.get(offer.name)) is None:
                self.workers[offer.name] = RemoteWorker(
                    node=self.name, offer=offer, directory=self.directory, link=self.link
                )
            else:
                worker.merge_offer(offer)
        for name in self.workers.keys() - {offer.name for offer in state.offers}:
            del self.workers[name]

    def replace_offers(self, state: NodeState) -> None:
        """Replace a state whose offers were rejected or accepted meanwhile; loads stay as they were announced since."""
        self.state = state
        for offer in state.offers:
            self.workers[offer.name].replace_offer(offer)


@define(eq=False)
class NodeRecords:
    """The records of all other nodes, by name."""

    own_name: str
    directory: SiblingDirectory
    _records: dict[str, NodeRecord] = Factory(dict)

    def __iter__(self) -> Iterator[NodeRecord]:
        """Yield the records in the order in which the nodes were learned of."""
        return iter(self._records.values())

    def __getitem__(self, node: str) -> NodeRecord:
        """Return the record of a node; raises `KeyError` if there is none."""
        return self._records[node]

    def get(self, node: str) -> NodeRecord | None:
        """Return the record of a node, None if there is none."""
        return self._records.get(node)

    def add(self, node: str) -> NodeRecord:
        """Return the record of a node, a new one if there is none."""
        if (record := self._records.get(node)) is None:
            record = self._records[node] = NodeRecord(node, self.directory)
        return record

    def has_room_for(self, node: str) -> bool:
        """Whether one more node can be recorded: others would not accept a longer list of neighbours."""
        return node in self._records or len(self._records) < NODES_MAX

    def is_rumour(self, node: str) -> bool:
        """Whether only another node has named a node: there has never been a link to it, and it is not configured."""
        record = self._records.get(node)
        return record is not None and record.named_by is not None and not record.is_configured

    def without_excess(self, node: str, state: NodeState) -> NodeState:
        """Return the state of a node without the workers beyond the limit of all nodes; log that once.

        They count again when the node announces its next state.
        """
        named = self.add(node)
        if len(state.offers) <= len(named.workers) and not named.workers_left_out:
            return state  # nearly always; counting all others takes longer the more there are
        room = max(0, WORKERS_MAX - sum(len(record.workers) for record in self if record is not named))
        left_out = max(0, len(state.offers) - room)
        if left_out and not named.workers_left_out:
            reason = f"{left_out} of {len(state.offers)} are beyond {WORKERS_MAX} of all nodes"
            log.warning("workers of a node are not asked", extra={"peer": node, "reason": reason})
        named.workers_left_out = left_out > 0
        return evolve(state, offers=state.offers[:room]) if left_out else state

    def merge_neighbours(self, node: str, neighbours: Sequence[Neighbour]) -> None:
        """Record the nodes that a node names, and log once if there are more than it may add."""
        unconfirmed = [record for record in self if record.link is None and not record.is_configured]
        room = min(
            NODES_MAX - len(self._records),
            UNCONFIRMED_MAX - len(unconfirmed),
            UNCONFIRMED_BY_NODE_MAX - sum(record.named_by == node for record in unconfirmed),
        )
        left_out = 0
        for neighbour in neighbours:
            if (record := self._records.get(neighbour.name)) is not None:
                record.unnamed_since = None
            if neighbour.name == self.own_name or neighbour.address is None:
                continue
            if neighbour.name not in self._records:
                if room <= 0:
                    left_out += 1
                    continue
                room -= 1
                self.add(neighbour.name).named_by = node
            self._merge_address(self._records[neighbour.name], neighbour, from_itself=neighbour.name == node)
        named = self.add(node)
        if left_out and not named.left_out:
            reason = f"{left_out} of {len(neighbours)} have no link to here and are too many"
            log.info("nodes that a node names are not dialed", extra={"peer": node, "reason": reason})
        named.left_out = left_out > 0

    def _merge_address(self, record: NodeRecord, neighbour: Neighbour, *, from_itself: bool) -> None:
        """Record where a node listens: cluster.toml decides, then the node itself; no other node replaces an address.

        Otherwise two nodes that disagree could keep each other announcing for ever.
        """
        if not record.address_is_configured and (from_itself or record.address is None):
            record.address = neighbour.address
        if record.link is None:
            record.routes = neighbour.routes

    async def forget(self) -> list[str]:
        """Remove each node that has been unnamed for `FORGET_S`, and return their names; called from time to time.

        cluster.toml names a node, and so does a link to it, or to another node that has a link to it. A node that was
        removed is recorded again when it is named again.
        """
        await trio.lowlevel.checkpoint()
        now, named = trio.current_time(), set[str]()
        for record in [record for record in self if record.link is not None]:
            named.update(neighbour.name for neighbour in record.state.neighbours)
            await trio.lowlevel.checkpoint()  # there may be thousands of names, and of links
        for record in self:
            if record.is_configured or record.link is not None or record.name in named:
                record.unnamed_since = None
            elif record.unnamed_since is None:
                record.unnamed_since = now
        since = {record.name: record.unnamed_since for record in self if record.unnamed_since is not None}
        forgotten = [name for name, unnamed_since in since.items() if now >= unnamed_since + FORGET_S]
        for name in forgotten:
            del self._records[name]
        return forgotten
