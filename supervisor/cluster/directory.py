"""Who computes in this cluster, and how busy: this node's own workers, and what other nodes tell of theirs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from math import inf
from typing import TypeVar, cast

import trio
from attrs import Factory, define, evolve, field

from actors.routing.ports import Worker
from protocol.cluster import COUNT_MAX, NEIGHBOURS_MAX, Leg, LoadUpdate, Neighbour, NodeState, Offer
from protocol.errors import PeerViolation
from protocol.messages import EngineInfo
from supervisor.cluster.model_identity import ModelIdentities
from supervisor.cluster.pool import RankedWorkers, WorkerPool
from supervisor.cluster.workers import LocalWorker, RemoteWorker
from supervisor.links.link import Link
from supervisor.supervision.changes import Changes

T = TypeVar("T")

NODES_MAX = NEIGHBOURS_MAX - 1  # beside this one
RUMOURS_MAX = 256  # nodes that others have told of and that no link has been to
FORGET_S = 600.0  # after which a node is forgotten that neither the file nor any node that can be heard names
PORT_MAX = 65535


@define(eq=False)
class _Node:
    """Another node as this one knows it."""

    state: NodeState = NodeState()
    link: Link | None = None
    address: str | None = None
    filed: bool = False  # it stands in the cluster's file
    fixed: bool = False  # its address does, too
    unnamed_since: float | None = None  # as `forget` has seen it
    expected: dict[str, Offer] = Factory(dict)
    routes: bool = False
    workers: dict[str, RemoteWorker] = Factory(dict)


@define(eq=False)
class Directory:
    """All that this node knows of the cluster."""

    name: str
    here: dict[str, LocalWorker] = field(factory=dict)
    draining: bool = False
    ranks: int = 0  # that run here, of engines on other nodes
    address: str | None = None  # where other nodes find this one
    routes: bool = True  # it gives requests to workers of others, and must know how busy they are
    must_meet: frozenset[str] = frozenset()  # the nodes that this one needs a link to
    tell_s: float = 0.0  # that others shall wait between two words of their loads
    # Who refuses this process, since another has its name, how, and until when that counts if it is not said again.
    twins: dict[str, tuple[str, float]] = field(factory=dict)
    models: ModelIdentities = field(factory=ModelIdentities)
    changed: Changes = field(factory=Changes)
    loads: int = 0  # how often the load of a worker here has changed for a node that is told of it
    news: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)  # for whoever tells the others
    idle: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)  # woken when a worker here has ended all
    _rooms: dict[str, trio.lowlevel.ParkingLot] = field(factory=dict)
    _hearers: set[str] = field(factory=set)  # the nodes that route and that a link leads to
    _derived: dict[Hashable, object] = field(factory=dict)
    _derived_at: int = -1  # the version that it was derived from
    _nodes: dict[str, _Node] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.changed.then = self._on_changed

    def _on_changed(self) -> None:
        self.news.unpark_all()
        self.idle.unpark_all()
        for room in self._rooms.values():
            room.unpark_all()

    def derived(self, key: Hashable, derive: Callable[[], T]) -> T:
        """Return what `derive` makes of all but the loads; it is kept until a worker, node or link comes or goes."""
        if self._derived_at != self.changed.version:
            self._derived.clear()
            self._derived_at = self.changed.version
        if key not in self._derived:
            self._derived[key] = derive()
        return cast("T", self._derived[key])

    def expect(self, node: str, address: str | None, offers: Sequence[Offer] = ()) -> None:
        """Note a node of the cluster's file, where it listens, and the workers that it will have."""
        known = self._nodes.setdefault(node, _Node())
        known.filed, known.fixed, known.address = True, address is not None, address or known.address
        known.expected = {offer.name: offer for offer in offers}
        if known.link is None:
            self._down(node, known)

    def takes(self, node: str) -> bool:
        """Whether one more node can be known; beyond some number, others would not believe what this one tells."""
        return node in self._nodes or len(self._nodes) < NODES_MAX

    def linked(self, node: str, link: Link) -> None:
        """Note that a node can be asked over this link, and over no other."""
        known = self._nodes.setdefault(node, _Node())
        known.link = link
        for worker in known.workers.values():
            worker.link = link
        self.changed.unpark_all()

    def unlinked(self, node: str, link: Link) -> None:
        """Note that a link is lost; another may have taken its place already."""
        known = self._nodes.get(node)
        if known is not None and known.link is link:
            known.link = None
            self.models.forget(node)
            self._hearers.discard(node)
            self._down(node, known)
            self._rejudge()
            self.changed.unpark_all()

    def told(self, node: str, state: NodeState) -> None:
        """Note how another node says that it is; raises `PeerViolation`, and notes nothing, if that cannot be true."""
        for offer in state.offers:
            if offer.engine is not None:
                _check(offer.name, offer.engine)
        state = self.models.judged(node, state)
        known = self._nodes.setdefault(node, _Node())
        known.routes = state.routes
        (self._hearers.add if state.routes and known.link is not None else self._hearers.discard)(node)
        self._told(node, known, state)
        self._rejudge()
        for neighbour in state.neighbours:
            self._heard(neighbour, from_itself=neighbour.name == node)
        self.changed.unpark_all()  # first: what is derived from before would say that nobody has come up
        self.turn_away()

    def _rejudge(self) -> None:
        """Ask others of the same model, if other weights of it stand now; how busy they are was told since."""
        for node, state in self.models.reapply():
            known = self._nodes[node]
            for offer in state.offers:
                known.workers[offer.name].judged(offer)
            known.state = state

    def merge_loads(self, node: str, loads: LoadUpdate) -> None:
        """Note how busy others make the workers of a node."""
        known = self._nodes.setdefault(node, _Node())
        for load in loads.loads:
            if (worker := known.workers.get(load.name)) is not None:
                worker.told(load)
                self._moved(worker)

    def loaded(self, worker: LocalWorker | RemoteWorker, asker: str | None) -> None:
        """Hear that a worker has one request more, or one less, and which other node asks it, if one does."""
        self._moved(worker)
        if isinstance(worker, LocalWorker):
            if worker.busy == 0:
                self.idle.unpark_all()
            if len(self._hearers) > (asker in self._hearers):  # a node that asks knows of it before it is told
                self.loads += 1
                self.news.unpark_all()

    def begun(self, worker: LocalWorker | RemoteWorker) -> None:
        """Hear that a worker has begun a request that this node asks, so that it may have room for another prompt."""
        self._moved(worker)

    def _moved(self, worker: LocalWorker | RemoteWorker) -> None:
        ranked = self._derived.get(("ranked", worker.model, worker.leg))
        if isinstance(ranked, RankedWorkers) and self._derived_at == self.changed.version:
            ranked.move(worker)
        if (room := self._rooms.get(worker.model)) is not None and room and not worker.load.full:
            room.unpark_all()

    def turn_away(self) -> None:
        """Let what waits for engines that are down go elsewhere, where it can; to be called when others come up."""
        for here in self.here.values():
            if here.plug.current is None:
                here.turn_away()

    def _heard(self, neighbour: Neighbour, *, from_itself: bool) -> None:
        """Note where a node listens: the file knows best, then the node itself; a rumour never replaces another.

        So no two nodes with different opinions can keep each other talking.
        """
        name, address = neighbour.name, neighbour.address
        if name == self.name or address is None or not self.takes(name):
            return
        rumours = (each for each in self._nodes.values() if each.link is None and not each.filed)
        if name not in self._nodes and sum(1 for _ in rumours) >= RUMOURS_MAX:
            return
        known = self._nodes.setdefault(name, _Node())
        if not known.fixed and (from_itself or known.address is None):
            known.address = address
        if known.link is None:
            known.routes = neighbour.routes

    def _told(self, node: str, known: _Node, state: NodeState) -> None:
        known.state = state
        for offer in state.offers:
            if (worker := known.workers.get(offer.name)) is None:
                known.workers[offer.name] = RemoteWorker(node, offer, self, known.link)
            else:
                worker.offer = offer
        for name in known.workers.keys() - {offer.name for offer in state.offers}:
            del known.workers[name]

    def _down(self, node: str, known: _Node) -> None:
        """Keep the workers of the file, as they are when nothing can be asked of them, and forget the others."""
        offers = []
        for name, offer in known.expected.items():
            last = known.workers[name].offer.engine if name in known.workers else None
            offers.append(evolve(offer, up=False, engine=last or offer.engine))
        for worker in known.workers.values():
            worker.link = None
        self._told(node, known, NodeState(tuple(offers)))

    def forget(self) -> list[str]:
        """Forget each node that nobody has named for `FORGET_S`, and return their names; to be called now and then.

        The file names a node, and so does a link to it, or to another node that has one. Who was forgotten can be
        heard of again.
        """
        now = trio.current_time()
        linked = [known for known in self._nodes.values() if known.link is not None]
        told = {neighbour.name for known in linked for neighbour in known.state.neighbours}
        for name, known in self._nodes.items():
            if known.filed or known.link is not None or name in told:
                known.unnamed_since = None
            elif known.unnamed_since is None:
                known.unnamed_since = now
        since = {name: known.unnamed_since for name, known in self._nodes.items() if known.unnamed_since is not None}
        gone = [name for name, at in since.items() if now >= at + FORGET_S]
        for name in gone:
            del self._nodes[name]
        return gone

    # What is known -----------------------------------------------------------------------

    def workers(self, model: str) -> list[Worker]:
        """Return the workers of a model that can be asked now."""
        ours = [each for each in self.here.values() if each.plug.current is not None]
        here: list[Worker] = [each for each in ours if each.offered.model == model]
        theirs = [each for known in self._reachable() for each in known.workers.values()]
        return here + [each for each in theirs if each.offer.model == model and each.offer.up]

    def ranked(self, model: str, leg: Leg) -> RankedWorkers:
        """Return the workers of a model and a leg that can be asked now, the least busy first."""
        return self.derived(
            ("ranked", model, leg), lambda: RankedWorkers.of([each for each in self.workers(model) if each.leg is leg])
        )

    def room(self, model: str) -> trio.lowlevel.ParkingLot:
        """Return where those wait for whom no worker of the model has room."""
        return self._rooms.setdefault(model, trio.lowlevel.ParkingLot())

    def others(self, but: LocalWorker) -> bool:
        """Whether another worker of the same model and leg can be asked now, or one that computes both.

        A node that does not route knows it of those that do.
        """
        can = sum(len(self.ranked(but.model, leg)) for leg in {but.leg, Leg.BOTH}) - (but.plug.current is not None)
        return can > 0 or any(but.offered.name in self._nodes[hearer].state.elsewhere for hearer in self._hearers)

    def legs(self, model: str) -> dict[str, Leg]:
        """Return the legs of all workers of a model that are known, by their names in the cluster."""
        return self.derived(("legs", model), lambda: {name: offer.leg for name, offer in self.named(model).items()})

    def meets(self, node: str) -> bool:
        """Whether this node is to have a link to another: to all if it routes, else to those who do or whom it must."""
        known = self._nodes.get(node)
        return self.routes or node in self.must_meet or (known is not None and known.routes)

    def offers(self, model: str | None = None) -> list[Offer]:
        """Return how each worker of a model is, or of all, whether it can be asked or not."""
        return [offer for each in self.every() if model in {None, (offer := each.offer).model}]

    def named(self, model: str | None = None) -> dict[str, Offer]:
        """Return the same by the names that workers have in the cluster: two nodes may have workers of one name."""
        return {each.load.name: offer for each in self.every() if model in {None, (offer := each.offer).model}}

    def pool(self, model: str) -> WorkerPool:
        """Return the workers of a model as they come and go."""
        return WorkerPool(self, model)

    def state(self) -> NodeState:
        """Return all that this node would tell of itself, to whom it is nobody's hearer: an operator."""
        return NodeState(tuple(each.offer for each in self.here.values()), self._linked(), self.draining, self.routes)

    def state_for(self, node: str) -> NodeState:
        """Return what another node is told of this one: offers and all neighbours if it routes, else only who does."""
        if node in self._hearers:
            offers = tuple(each.offer_for(node) for each in self.here.values())
            state = NodeState(offers, self._linked(), self.draining, self.routes, self.tell_s)
        else:
            state = self.derived("state", self._state_for_workers)
        known = self._nodes.get(node)
        down = () if known is None or not self.routes else tuple(each for each in known.state.offers if not each.up)
        return evolve(state, elsewhere=tuple(each.name for each in down if self._able(each))) if down else state

    def _state_for_workers(self) -> NodeState:
        # Itself too: one that has joined here is found by those who route because this node can say where it listens.
        found = tuple(each for each in self._linked() if each.routes or each.name == self.name)
        return NodeState((), found, self.draining, self.routes, self.tell_s)

    def _able(self, offer: Offer) -> bool:
        """Whether any worker can do the work of one that is down."""
        return any(len(self.ranked(offer.model, leg)) for leg in {offer.leg, Leg.BOTH})

    def _linked(self) -> tuple[Neighbour, ...]:
        """Return this node, if it can be found, and those that it has a link to.

        What all have heard of and nobody reaches is to be forgotten.
        """
        itself = () if self.address is None else (Neighbour(self.name, self.address, self.routes),)
        linked = ((name, known) for name, known in sorted(self._nodes.items()) if known.link is not None)
        return (*itself, *(Neighbour(name, known.address, known.routes) for name, known in linked))

    def announce_interval_s(self, node: str) -> float:
        """Return how long a node wants not to hear of loads once it has."""
        return self._nodes[node].state.tell_s

    @property
    def subscribers(self) -> Collection[str]:
        """The nodes that are told the loads of this one's workers."""
        return self._hearers

    @property
    def twin(self) -> str | None:
        """How a node has refused this process of late because another has its name, None if none has."""
        return next((said for said, until in self.twins.values() if trio.current_time() < until), None)

    async def wait_changed(self) -> None:
        """Wait until a worker, a node or a link comes or goes, or the claim that another has its name expires."""
        now = trio.current_time()
        with trio.move_on_at(min((until for _, until in self.twins.values() if now < until), default=inf)):
            await self.changed.park()

    def drain(self) -> None:
        """Let nobody choose this node's workers any more."""
        self.draining = True
        self.changed.unpark_all()

    @property
    def leaving(self) -> set[str]:
        """The names, as in `named`, of workers on nodes that drain: nobody new is served by those."""
        here = self.here.values() if self.draining else ()
        theirs = (known.workers.values() for known in self._nodes.values() if known.state.draining)
        return {each.load.name for workers in (here, *theirs) for each in workers}

    @property
    def stalled(self) -> set[str]:
        """The names, as in `named`, of workers on nodes that stand still: nobody is served by those."""
        known = (each for each in self._nodes.values() if each.link is not None and each.link.stalled)
        return {worker.load.name for each in known for worker in each.workers.values()}

    async def wait_idle(self) -> None:
        """Wait until no request runs on this node's workers, and no rank of another node's engine."""
        await trio.lowlevel.checkpoint()
        while self.running or self.ranks:
            await self.idle.park()

    @property
    def running(self) -> int:
        """How many requests this node's workers have."""
        return sum(each.busy for each in self.here.values())

    @property
    def nodes(self) -> Mapping[str, tuple[NodeState, Link | None, str | None]]:
        """The other nodes: how each says that it is, the link to it if there is one, where it listens."""
        return {name: (known.state, known.link, known.address) for name, known in self._nodes.items()}

    def addresses(self) -> Iterator[tuple[str, str | None]]:
        """Yield the other nodes, and where each listens, as far as is known."""
        return ((name, known.address) for name, known in self._nodes.items())

    def address_of(self, node: str) -> str | None:
        """Return where a node listens, None if that is not known."""
        known = self._nodes.get(node)
        return None if known is None else known.address

    def every(self) -> Iterator[LocalWorker | RemoteWorker]:
        """Yield every worker that is known, whether it can be asked or not."""
        yield from self.here.values()
        for known in self._nodes.values():
            yield from known.workers.values()

    def _reachable(self) -> Iterator[_Node]:
        for known in self._nodes.values():
            if known.link is not None and not (known.link.lost or known.link.stalled or known.state.draining):
                yield known


def _check(name: str, engine: EngineInfo) -> None:
    """Raise `PeerViolation` for an engine that cannot be: its limits become those of whoever asks for its model."""
    sizes = (engine.vocabulary_size, engine.context_max, engine.kv_tokens_max, engine.request_tokens_max)
    counts = (*sizes, engine.running_max, engine.page_size, engine.ranks)
    if min(counts) < 1 or max(counts) > COUNT_MAX:
        raise PeerViolation(f"offer {name} has an engine that cannot be")
    if engine.bootstrap is not None and not 0 < engine.bootstrap[1] <= PORT_MAX:
        raise PeerViolation(f"offer {name} has a rendezvous that cannot be")
