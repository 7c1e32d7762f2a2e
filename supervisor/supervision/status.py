"""How each child of a node's tree stands, from what happens to it."""

from __future__ import annotations

from collections.abc import Iterator

import trio
from attrs import define, field, frozen

from protocol.cluster import ChildState
from supervisor.supervision.events import ChildEvent, ChildEventKind, error_text
from supervisor.supervision.tree import Child, Tree

UP, WAITS = "up", "not started"
STATES = {
    ChildEventKind.STARTING: "starting",
    ChildEventKind.STARTED: UP,
    ChildEventKind.ENDED: "ended",
    ChildEventKind.FAILED: "failed",
    ChildEventKind.RESTARTING: "starts again",
    ChildEventKind.STOPPING: "stopping",
    ChildEventKind.STOPPED: "stopped",
    ChildEventKind.IGNORES_CANCEL: "does not stop",
    ChildEventKind.GAVE_UP: "gave up",
}
WHY_LENGTH_MAX = 500


@define(eq=False)
class _Stand:
    state: str = WAITS
    starts: int = 0
    since: float | None = None
    why: str = ""


@frozen
class EarlierFailures:
    """What a launcher knows of a node's processes before this one: how many ended unasked, and why the last one did."""

    count: int = 0
    why: str = ""


@define(eq=False)
class TreeStatus:
    """Follows one tree, which never changes its shape; nothing in here is ever more than the tree has members."""

    tree: Tree
    earlier: EarlierFailures = EarlierFailures()
    _begun_at: float | None = None
    _stands: dict[str, _Stand] = field(factory=dict)

    def watch(self, happening: ChildEvent) -> None:
        """Note what has happened to a child."""
        if self._begun_at is None:
            self._begun_at = happening.at
        stand = self._stands.setdefault(happening.path, _Stand())
        if (state := STATES[happening.kind]) != stand.state:
            stand.state, stand.since = state, happening.at
        stand.starts += happening.kind is ChildEventKind.STARTING
        if happening.error is not None:
            stand.why = error_text(happening.error)[:WHY_LENGTH_MAX]

    def why(self, path: str) -> str:
        """Return what went wrong last with the child at a path."""
        return self._stands.get(path, _Stand()).why

    @property
    def up_s(self) -> float:
        """For how long the tree has run, starting included."""
        return 0.0 if self._begun_at is None else trio.current_time() - self._begun_at

    def children(self) -> tuple[ChildState, ...]:
        """Return how every member of the tree is now, each before its children."""
        return tuple(self._children(self.tree, self.tree.name))

    def _children(self, member: Child | Tree, path: str) -> Iterator[ChildState]:
        stand = self._stands.get(path, _Stand())
        restarts, why = max(0, stand.starts - 1), stand.why
        if path == self.tree.name:
            restarts, why = restarts + self.earlier.count, why or self.earlier.why[:WHY_LENGTH_MAX]
        state, since = stand.state, stand.since
        children = member.children if isinstance(member, Tree) else ()
        if path == self.tree.name and path not in self._stands:  # nobody starts the root: it is as its children are
            states = [self._state(f"{path}/{child.name}") for child in children]
            state, since = next((each for each in states if each != UP), UP), self._begun_at
        since_s = 0.0 if since is None else max(0.0, trio.current_time() - since)
        yield ChildState(path, state, restarts, round(since_s, 3), member.about, why)
        for child in children:
            yield from self._children(child, f"{path}/{child.name}")

    def _state(self, path: str) -> str:
        return self._stands.get(path, _Stand()).state
