"""One other node as the directory records it: its latest state, its workers, the link to it and its address."""

from __future__ import annotations

from attrs import Factory, define, evolve, frozen

from protocol.cluster import NodeState, Offer
from supervisor.cluster.workers import RemoteWorker, SiblingDirectory
from supervisor.links.link import Link


@frozen
class KnownNode:
    """What others may read of a node: the state that it announced last, the link to it, where it listens."""

    state: NodeState = NodeState()
    link: Link | None = None
    address: str | None = None


UNKNOWN_NODE = KnownNode()


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
    unnamed_since: float | None = None  # as `Directory.forget` has seen it, on Trio's clock
    expected: dict[str, Offer] = Factory(dict)  # the workers that cluster.toml gives it
    routes: bool = False
    workers: dict[str, RemoteWorker] = Factory(dict)

    @property
    def known(self) -> KnownNode:
        """What others may read of it."""
        return KnownNode(self.state, self.link, self.address)

    @property
    def is_reachable(self) -> bool:
        """Whether its workers may be chosen: neither lost, nor stalled, nor draining."""
        link = self.link
        return link is not None and not (link.lost or link.stalled or self.state.draining)

    def connect(self, link: Link) -> None:
        """Ask its workers over this link, and over no other."""
        self.link = link
        for worker in self.workers.values():
            worker.link = link

    def disconnect(self) -> None:
        """Keep the workers of cluster.toml, as ones that cannot be asked, and remove all others."""
        self.link = None
        offers = []
        for name, offer in self.expected.items():
            engine = self.workers[name].offer.engine if name in self.workers else None
            offers.append(evolve(offer, up=False, engine=engine or offer.engine))
        for worker in self.workers.values():
            worker.link = None
        self.merge(NodeState(tuple(offers)))

    def merge(self, state: NodeState) -> None:
        """Take over a state, whose workers replace those that were known."""
        self.state = state
        for offer in state.offers:
            if (worker := self.workers.get(offer.name)) is None:
                self.workers[offer.name] = RemoteWorker(self.name, offer, self.directory, self.link)
            else:
                worker.offer = offer
        for name in self.workers.keys() - {offer.name for offer in state.offers}:
            del self.workers[name]

    def replace_offers(self, state: NodeState) -> None:
        """Take over another judgement of the same state; loads stay as they were announced since."""
        self.state = state
        for offer in state.offers:
            self.workers[offer.name].replace_offer(offer)
