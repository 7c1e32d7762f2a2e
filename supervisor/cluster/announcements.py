"""The announcements of a node about itself: to each node what concerns it, when it changes, and loads as differences.

A router needs all workers and their loads; a worker needs only the nodes that route, and whether others can do the work
of its down engines. One task announces over all links: the cost of a change follows its size, and a message for many
nodes is encoded once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf

import trio
from attrs import Factory, define, evolve, field

from protocol.link import codec
from protocol.messages.cluster import InFlightCounts, Leg, LoadUpdate, Neighbour, NodeState, Offer
from supervisor.cluster.directory import Directory
from supervisor.cluster.workers import LocalWorker
from supervisor.links.link import Link


@define(eq=False)
class _Announced:
    """The state that has been announced over one link."""

    link: Link
    state: NodeState
    loads: dict[str, InFlightCounts] = Factory(dict)
    due_at: float = -inf  # before that the other end wants no loads


@define(eq=False)
class Announcer:
    """Announces this node's state and loads to the nodes that it has links to."""

    directory: Directory
    _announced: dict[str, _Announced] = field(factory=dict)  # by node

    def add(self, node: str, link: Link) -> None:
        """Announce the state for a node now: the node has come, or gets another part from now on."""
        state = state_for(self.directory, node)
        self._announced[node] = _Announced(link, state, self._loads_in_state(node))
        link.announce(state)

    def remove(self, node: str, link: Link) -> None:
        """Announce nothing more over a link."""
        announced = self._announced.get(node)
        if announced is not None and announced.link is link:
            del self._announced[node]

    async def run(self, every_s: Callable[[], float]) -> None:
        """Announce each change at once, and then nothing for `every_s`."""
        version, load_version = -1, -1
        while True:
            directory = self.directory
            due_at = inf
            if directory.version != version:
                version = directory.version
                self._announce_states()
            if directory.load_version != load_version or directory.subscribers:
                load_version = directory.load_version
                due_at = self._announce_loads()
            await trio.sleep(every_s())
            if (directory.version, directory.load_version) == (version, load_version):
                with trio.move_on_at(due_at):
                    await directory.wait_announceable()

    def _announce_states(self) -> None:
        bodies: dict[int, bytes] = {}
        states: list[NodeState] = []  # kept, so that no other has the identity of one of them
        for node, announced in self._announced.items():
            state = state_for(self.directory, node)
            if state is announced.state or state == announced.state:
                continue
            states.append(state)
            if id(state) not in bodies:
                bodies[id(state)] = codec.encode(state)
            announced.state, announced.loads = state, self._loads_in_state(node)
            announced.link.announce_encoded(bodies[id(state)])

    def _announce_loads(self) -> float:
        """Announce changed loads to each due node; return when the next one is due, if any is not."""
        now, next_at = trio.current_time(), inf
        bodies: dict[LoadUpdate, bytes] = {}
        for node in self.directory.subscribers:
            if (announced := self._announced.get(node)) is None:
                continue
            loads = self._loads(node)
            changed = LoadUpdate(tuple(load for name, load in loads.items() if announced.loads.get(name) != load))
            if not changed.loads:
                continue
            if now < announced.due_at:
                next_at = min(next_at, announced.due_at)
                continue
            announced.loads, announced.due_at = loads, now + self.directory.records[node].state.announce_s
            if changed not in bodies:
                bodies[changed] = codec.encode(changed)
            announced.link.announce_encoded(bodies[changed])
        return next_at

    def _loads(self, node: str) -> dict[str, InFlightCounts]:
        if node not in self.directory.subscribers:
            return {}
        return {worker.name: worker.load_without(node) for worker in _offered(self.directory, node)}

    def _loads_in_state(self, node: str) -> dict[str, InFlightCounts]:
        """Return the loads as another node has them from a state, which lacks the queued prompts."""
        return {name: evolve(load, queued=0) for name, load in self._loads(node).items()}


def _offered(directory: Directory, node: str) -> list[LocalWorker]:
    """Return the workers to announce to a router: encoders, embedders and ranks only if it takes them."""
    state = directory.node(node).state
    takes = {Leg.ENCODE: state.takes_encoders, Leg.EMBED: state.takes_embedders}
    return [
        worker
        for worker in directory.local.values()
        if takes.get(worker.leg, True) and (state.takes_ranks or worker.ranks == 1)
    ]


def state_for(directory: Directory, node: str) -> NodeState:
    """Return what concerns another node: offers and all neighbours if it routes, else only the nodes that route."""
    if node in directory.subscribers:
        offers = tuple(worker.offer_for(node) for worker in _offered(directory, node))
        state = evolve(_own_state(directory, directory.neighbours()), offers=offers)
    else:
        state = directory.derived("state", partial(_state_for_workers, directory))
    down = [offer for offer in directory.node(node).state.offers if not offer.up] if directory.routes else []
    elsewhere = tuple(offer.name for offer in down if _can_serve(directory, offer))
    return evolve(state, elsewhere=elsewhere) if down else state


def _state_for_workers(directory: Directory) -> NodeState:
    # Itself as well: a node that has joined here is found by those that route because this one names its address.
    neighbours = tuple(node for node in directory.neighbours() if node.routes or node.name == directory.name)
    return _own_state(directory, neighbours)


def _own_state(directory: Directory, neighbours: tuple[Neighbour, ...]) -> NodeState:
    return NodeState(
        neighbours=neighbours,
        draining=directory.draining,
        routes=directory.routes,
        announce_s=directory.announce_s,
        takes_encoders=True,
        watched=True,
        takes_ranks=True,
        takes_embedders=True,
    )


def _can_serve(directory: Directory, offer: Offer) -> bool:
    """Whether any worker can do the work of one that is down."""
    return any(len(directory.ranked(offer.model, leg)) for leg in offer.leg.substitutes)
