"""The directory: the workers of this cluster, their loads, and its nodes.

There is no coordinator: each node announces its own state over its links, and every directory converges on the same
picture, late by as much as an announcement takes. A choice by the directory may therefore turn out wrong, and must
allow for it.

Two things change at two speeds, and must stay apart. Workers, nodes and links come and go seldom: `notify` counts a
`version`, wakes all waiting tasks, and drops all derived values. Loads change with every request: they wake only tasks
in wait for capacity of that model, and the announcer of loads. The cost of a request must never grow with the number of
nodes, but for policies that are meant to look at all workers.

Announcements may be wrong. They are checked before they are merged, and kept within limits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from math import inf
from typing import TypeVar, cast

import trio
from attrs import define, evolve, field, setters

from protocol.messages.cluster import Leg, LoadUpdate, Neighbour, NodeState, Offer
from protocol.weights_record import WeightsRecord
from supervisor.cluster.cluster_worker import ClusterWorker
from supervisor.cluster.engine_checks import check_engine
from supervisor.cluster.model_identity import ModelIdentities
from supervisor.cluster.model_weights import NewestWeights
from supervisor.cluster.node_records import UNKNOWN_NODE, NodeRecords, NodeSnapshot
from supervisor.cluster.ranking import SortedRanking
from supervisor.cluster.workers import LocalWorker
from supervisor.links.link import Link
from supervisor.supervision.registration import OUT_OF_SERVICE

T = TypeVar("T")


@define(eq=False)
class Directory:
    """The cluster as this node knows it: its workers, its nodes, and the tasks that wait for either to change."""

    name: str = field(on_setattr=setters.frozen)
    local: dict[str, LocalWorker] = field(factory=dict, on_setattr=setters.frozen)  # its own workers, by name
    draining: bool = False
    follower_ranks: int = 0  # that run here, of engines whose first rank runs on another node
    address: str | None = None  # where other nodes find this one
    # Whether it sends requests to workers of other nodes, so that it must know how busy those are.
    routes: bool = field(default=True, on_setattr=setters.frozen)
    required_peers: frozenset[str] = field(default=frozenset(), on_setattr=setters.frozen)  # it needs a link to them
    announce_s: float = 0.0  # how long others are to wait between two announcements of their loads
    # By node: why it refuses this process (another one has this name), and until when that counts.
    name_conflicts: dict[str, tuple[str, float]] = field(factory=dict)
    models: ModelIdentities = field(factory=ModelIdentities, on_setattr=setters.frozen)
    version: int = 0  # counts what changes seldom: see `notify`
    load_version: int = 0  # counts the changes of loads that concern another node
    _changed: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)
    _announceable: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)
    _idle: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)
    _capacity: dict[str, trio.lowlevel.ParkingLot] = field(factory=dict)  # by model
    _subscribers: set[str] = field(factory=set)  # the nodes that route and to which there is a link
    _newest_weights: dict[str, NewestWeights] = field(factory=dict)  # by model
    _derived: dict[Hashable, object] = field(factory=dict)
    _subsets: dict[tuple[str, Leg], set[frozenset[str]]] = field(factory=dict)  # of workers, which are ranked alone
    _derived_version: int = -1
    records: NodeRecords = field(init=False, on_setattr=setters.frozen)  # of the other nodes

    @records.default
    def _no_records(self) -> NodeRecords:
        return NodeRecords(self.name, self)

    # Waiting -----------------------------------------------------------------------------

    def notify(self) -> None:
        """Count a change of workers, nodes or links, and wake everybody who waits for one; not for a load."""
        self.version += 1
        self._changed.unpark_all()
        self._announceable.unpark_all()
        self._idle.unpark_all()
        for waiting in self._capacity.values():
            waiting.unpark_all()

    async def wait_changed(self) -> None:
        """Wait until a worker, a node or a link comes or goes, or a name conflict expires."""
        now = trio.current_time()
        with trio.move_on_at(min((until for _, until in self.name_conflicts.values() if now < until), default=inf)):
            await self._changed.park()

    async def wait_announceable(self) -> None:
        """Wait until there is a change, or a load, to announce to other nodes."""
        await self._announceable.park()

    async def wait_capacity(self, model: str) -> None:
        """Wait until a worker of a model comes, goes or has capacity, or until `notify_capacity`."""
        await self._capacity.setdefault(model, trio.lowlevel.ParkingLot()).park()

    def notify_capacity(self, model: str) -> None:
        """Wake everybody in `wait_capacity`."""
        if (waiting := self._capacity.get(model)) is not None:
            waiting.unpark_all()

    async def wait_worker_idle(self, name: str) -> None:
        """Wait until one of this node's engines has no request."""
        while any(worker.in_flight.requests for worker in self.local.values() if worker.engine_name == name):
            await self._idle.park()

    async def wait_idle(self) -> None:
        """Wait until this node's workers have no request, and no follower rank runs here."""
        await trio.lowlevel.checkpoint()
        while self.running or self.follower_ranks:
            await self._idle.park()

    def derived(self, key: Hashable, derive: Callable[[], T]) -> T:
        """Return the result of `derive`, which may read everything but loads; it is kept until the next `notify`."""
        if self._derived_version != self.version:
            self._derived.clear()
            self._derived_version = self.version
        if key not in self._derived:
            self._derived[key] = derive()
        return cast("T", self._derived[key])

    # What changes ------------------------------------------------------------------------

    def configure(self, node: str, address: str | None, offers: Sequence[Offer] = (), *, routes: bool = False) -> None:
        """Record a node of cluster.toml, where it listens, the workers that it will have, and whether it routes."""
        record = self.records.add(node)
        record.routes = record.routes or routes
        record.is_configured, record.address_is_configured = True, address is not None
        record.address = address or record.address
        record.expected = {offer.name: offer for offer in offers}
        if record.link is None:
            record.disconnect()

    def linked(self, node: str, link: Link) -> None:
        """Record the link over which a node can be asked, in place of another one."""
        self.records.add(node).connect(link)
        self.notify()

    def unlinked(self, node: str, link: Link) -> None:
        """Record that a link is lost, unless another one has taken its place already."""
        record = self.records.get(node)
        if record is not None and record.link is link:
            self.models.forget(node)
            self._subscribers.discard(node)
            record.disconnect()
            self._update_offers()
            self.notify()

    def merge_state(self, node: str, state: NodeState) -> None:
        """Merge the state that a node announces; raises `PeerViolation`, and merges nothing, if it cannot be true."""
        for offer in state.offers:
            check_engine(offer)
        state = self.models.apply(node, self.records.without_excess(node, state))
        for offer in state.offers:
            if offer.engine is not None and offer.weights.serial:
                self.newest_weights(offer.model).note(offer.weights)
        state = self._without_behind(state)
        record = self.records.add(node)
        record.routes = state.routes
        (self._subscribers.add if state.routes and record.link is not None else self._subscribers.discard)(node)
        record.merge(state)
        self._update_offers()
        self.records.merge_neighbours(node, state.neighbours)
        self.notify()  # first: what was derived before lacks a worker that has come up
        self.reroute_queued()

    def merge_loads(self, node: str, loads: LoadUpdate) -> None:
        """Merge the loads of a node's workers, without what this node asks of them."""
        record = self.records.add(node)
        for load in loads.loads:
            if (worker := record.workers.get(load.name)) is not None:
                worker.merge_load(load)
                self._rerank(worker)

    def load_changed(self, worker: ClusterWorker, asker: str | None) -> None:
        """Record that a worker's load has changed; `asker` is the other node whose request changed it, if any."""
        self._rerank(worker)
        if isinstance(worker, LocalWorker):
            if not worker.in_flight.requests:
                self._idle.unpark_all()
            if len(self._subscribers) > (asker in self._subscribers):  # a node that asks counts its own requests
                self.load_version += 1
                self._announceable.unpark_all()

    def reroute_queued(self) -> None:
        """Fail requests in wait for down local engines, if others can serve them; called when others come up."""
        for worker in self.local.values():
            if not worker.is_up:
                worker.reroute_queued()

    def drain(self) -> None:
        """Announce that this node drains: no router may choose its workers any more."""
        self.draining = True
        self.notify()

    def _update_offers(self) -> None:
        """Update the offers of models whose served weights have changed."""
        for node, state in self.models.reapply():
            self.records[node].replace_offers(self._without_behind(state))

    def newest_weights(self, model: str) -> NewestWeights:
        """Return the newest weights that an engine of a model has had, as this node knows them."""
        if (newest := self._newest_weights.get(model)) is None:
            newest = self._newest_weights[model] = NewestWeights()
            newest.followers.append(self._leave_behind)
        return newest

    def weights(self) -> dict[str, WeightsRecord]:
        """Return the newest weights of each model that has had an update."""
        return {model: newest.record for model, newest in self._newest_weights.items() if newest.record.serial}

    def _leave_behind(self) -> None:
        """Let no worker of another node be asked that is behind the weights of its model."""
        for record in self.records:
            if (state := self._without_behind(record.state)) is not record.state:
                record.replace_offers(state)

    def _without_behind(self, state: NodeState) -> NodeState:
        """Return a state in which each worker behind the weights of its model is down; the same if there is none."""
        reasons = {offer.name: reason for offer in state.offers if offer.up and (reason := self._behind(offer))}
        if not reasons:
            return state
        offers = (
            evolve(offer, up=False, why=f"{OUT_OF_SERVICE}: {reasons[offer.name]}") if offer.name in reasons else offer
            for offer in state.offers
        )
        return evolve(state, offers=tuple(offers))

    def _behind(self, offer: Offer) -> str:
        """Return why an engine of tokens is not asked whose weights are behind; empty if it is."""
        newest = self._newest_weights.get(offer.model) if offer.leg.generates else None
        return "" if newest is None else newest.behind(offer.weights)

    def _rerank(self, worker: ClusterWorker) -> None:
        for names in (None, *self._subsets.get((worker.model, worker.leg), ())):
            ranked = self._derived.get(("ranked", worker.model, worker.leg, names))
            if isinstance(ranked, SortedRanking) and self._derived_version == self.version:
                ranked.move(worker)
        if (waiting := self._capacity.get(worker.model)) is not None and waiting and not worker.load.full:
            waiting.unpark_all()

    # Workers -----------------------------------------------------------------------------

    def workers(self, model: str) -> list[ClusterWorker]:
        """Return the workers of a model that can be asked now, of every leg."""
        local = [worker for worker in self.local.values() if worker.is_up]
        remote = [worker for record in self.records if record.is_reachable for worker in record.workers.values()]
        workers: list[ClusterWorker] = [worker for worker in local if worker.model == model]
        return workers + [worker for worker in remote if worker.model == model and worker.is_up]

    def ranked(self, model: str, leg: Leg, names: frozenset[str] | None = None) -> SortedRanking[ClusterWorker]:
        """Return the workers of a model and a leg that can be asked now, the least busy first.

        With `names`, a pool of the cluster's file, only those of them.
        """
        if names is not None:
            self._subsets.setdefault((model, leg), set()).add(names)
        return self.derived(("ranked", model, leg, names), lambda: self._ranked(model, leg, names))

    def _ranked(self, model: str, leg: Leg, names: frozenset[str] | None) -> SortedRanking[ClusterWorker]:
        of_leg = [worker for worker in self.workers(model) if worker.leg is leg]
        return SortedRanking.of([worker for worker in of_leg if names is None or worker.full_name in names])

    def has_sibling(self, worker: ClusterWorker) -> bool:
        """Whether another worker can do the same work now (`Leg.substitutes`).

        A node that does not route learns this from routers.
        """
        workers = sum(len(self.ranked(worker.model, leg)) for leg in worker.leg.substitutes)
        if workers > (worker.ranks if worker.is_up else 0):
            return True
        return any(worker.name in self.records[node].state.elsewhere for node in self._subscribers)

    @property
    def routers(self) -> tuple[int, int]:
        """The number of nodes that route, this one included, and its place among them by name."""
        return self.derived("routers", self._count_routers)

    def _count_routers(self) -> tuple[int, int]:
        others = [record.name for record in self.records if record.routes]
        return 1 + len(others), sum(name < self.name for name in others)

    def legs(self, model: str) -> dict[str, Leg]:
        """Return the legs of all workers of a model by their names in the cluster, whether they can be asked or not."""
        offers = self.offers_by_name
        return self.derived(("legs", model), lambda: {name: offer.leg for name, offer in offers(model).items()})

    def all_workers(self) -> Iterator[ClusterWorker]:
        """Yield every worker, whether it can be asked or not."""
        yield from self.local.values()
        for record in self.records:
            yield from record.workers.values()

    def engines(self) -> dict[str, ClusterWorker]:
        """Return one worker of each engine by the engine's name in the cluster: any rank reaches all of it."""
        return {f"{worker.node}/{worker.engine_name}": worker for worker in self.all_workers()}

    def offers(self, model: str | None = None) -> list[Offer]:
        """Return the offers of all workers, or of those of one model, whether they can be asked or not."""
        return [offer for worker in self.all_workers() if model in {None, (offer := worker.offer).model}]

    def offers_by_name(self, model: str | None = None) -> dict[str, Offer]:
        """Return the same offers by the workers' names in the cluster: two nodes may have workers of one name."""
        workers = self.all_workers()
        return {worker.full_name: offer for worker in workers if model in {None, (offer := worker.offer).model}}

    @property
    def running(self) -> int:
        """The number of requests that this node's workers have."""
        return sum(worker.in_flight.requests for worker in self.local.values())

    @property
    def draining_workers(self) -> set[str]:
        """The names in the cluster of workers on nodes that drain."""
        local = self.local.values() if self.draining else ()
        remote = (record.workers.values() for record in self.records if record.state.draining)
        return {worker.full_name for workers in (local, *remote) for worker in workers}

    @property
    def stalled_workers(self) -> set[str]:
        """The names in the cluster of workers on nodes that stand still."""
        stalled = (record for record in self.records if record.link is not None and record.link.stalled)
        return {worker.full_name for record in stalled for worker in record.workers.values()}

    # Nodes -------------------------------------------------------------------------------

    @property
    def nodes(self) -> Mapping[str, NodeSnapshot]:
        """The other nodes by name."""
        return {record.name: record.snapshot for record in self.records}

    def node(self, name: str) -> NodeSnapshot:
        """Return one node, as one without state, link and address if it is unknown."""
        record = self.records.get(name)
        return UNKNOWN_NODE if record is None else record.snapshot

    def addresses(self) -> Iterator[tuple[str, str | None]]:
        """Yield the other nodes, and where each listens, if that is known."""
        return ((record.name, record.address) for record in self.records)

    def should_link(self, node: str) -> bool:
        """Whether this node needs a link to another one: to all if it routes, else to routers and required peers.

        Two nodes that route and do not listen cannot meet, and need not: they have no workers for each other.
        """
        record = self.records.get(node)
        if self.routes and record is not None and record.routes and not (self.address or record.address):
            return False
        return self.routes or node in self.required_peers or (record is not None and record.routes)

    @property
    def name_conflict(self) -> str | None:
        """Why another node refuses this process, since another process has its name; None if none has lately."""
        return next((why for why, until in self.name_conflicts.values() if trio.current_time() < until), None)

    # What this node announces ------------------------------------------------------------

    @property
    def subscribers(self) -> Collection[str]:
        """The nodes that get this one's offers and loads: the routers with a link to it."""
        return self._subscribers

    def state(self) -> NodeState:
        """Return this node's whole state, for an operator."""
        offers = tuple(worker.offer for worker in self.local.values())
        return NodeState(
            offers=offers,
            neighbours=self.neighbours(),
            draining=self.draining,
            routes=self.routes,
            takes_encoders=True,
            watched=True,
            takes_ranks=True,
            takes_embedders=True,
        )

    def neighbours(self) -> tuple[Neighbour, ...]:
        """Return this node, if it has an address, and its linked nodes: the others shall be forgotten."""
        itself = () if self.address is None else (Neighbour(self.name, self.address, self.routes),)
        linked = sorted((record for record in self.records if record.link is not None), key=lambda record: record.name)
        return (*itself, *(Neighbour(record.name, record.address, record.routes) for record in linked))
