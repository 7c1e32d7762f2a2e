"""What a node tells the others of itself: to each what concerns it, when it changes, and loads as differences.

One task tells all links, so that a change costs what has changed, and what is the same for many is encoded once.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import trio
from attrs import Factory, define, field

from protocol import codec
from protocol.cluster import LoadUpdate, NodeState, OfferLoad
from supervisor.cluster.directory import Directory
from supervisor.links.link import Link


@define(eq=False)
class _Hearer:
    """What the other end of a link has been told."""

    link: Link
    state: NodeState
    loads: dict[str, OfferLoad] = Factory(dict)
    due_at: float = -inf  # before that it wants to hear no loads


@define(eq=False)
class Announcer:
    """Tells the nodes that are linked."""

    directory: Directory
    _hearers: dict[str, _Hearer] = field(factory=dict)

    def add(self, node: str, link: Link) -> None:
        """Tell a node all that concerns it, now: it has come, or says what it wants to hear."""
        state = self.directory.state_for(node)
        self._hearers[node] = _Hearer(link, state, self._loads(node))
        link.announce(state)

    def remove(self, node: str, link: Link) -> None:
        """Tell a node nothing more over this link."""
        hearer = self._hearers.get(node)
        if hearer is not None and hearer.link is link:
            del self._hearers[node]

    async def run(self, every_s: Callable[[], float]) -> None:
        """Tell what changes at once, and then not again for `every_s`."""
        version, loads = -1, -1
        while True:
            directory = self.directory
            due_at = inf
            if directory.version != version:
                version = directory.version
                self._tell_states()
            if directory.load_version != loads or directory.subscribers:
                loads = directory.load_version
                due_at = self._tell_loads()
            await trio.sleep(every_s())
            if (directory.version, directory.load_version) == (version, loads):
                with trio.move_on_at(due_at):
                    await directory.wait_announceable()

    def _tell_states(self) -> None:
        bodies: dict[int, bytes] = {}
        states: list[NodeState] = []  # kept, so that no other has the identity of one of them
        for node, hearer in self._hearers.items():
            state = self.directory.state_for(node)
            if state is hearer.state or state == hearer.state:
                continue
            states.append(state)
            if id(state) not in bodies:
                bodies[id(state)] = codec.encode(state)
            hearer.state, hearer.loads = state, self._loads(node)
            hearer.link.announce_encoded(bodies[id(state)])

    def _tell_loads(self) -> float:
        """Tell those who are to hear it what has changed; return when the next of them is, if any is not yet."""
        now, next_at = trio.current_time(), inf
        bodies: dict[LoadUpdate, bytes] = {}
        for node in self.directory.subscribers:
            if (hearer := self._hearers.get(node)) is None:
                continue
            loads = self._loads(node)
            changed = LoadUpdate(tuple(load for name, load in loads.items() if hearer.loads.get(name) != load))
            if not changed.loads:
                continue
            if now < hearer.due_at:
                next_at = min(next_at, hearer.due_at)
                continue
            hearer.loads, hearer.due_at = loads, now + self.directory.announce_interval_s(node)
            if changed not in bodies:
                bodies[changed] = codec.encode(changed)
            hearer.link.announce_encoded(bodies[changed])
        return next_at

    def _loads(self, node: str) -> dict[str, OfferLoad]:
        if node not in self.directory.subscribers:
            return {}
        return {name: here.load_without(node) for name, here in self.directory.local.items()}
