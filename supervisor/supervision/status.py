"""The current status of each member of a tree, derived from its events."""

from __future__ import annotations

from collections.abc import Iterator

import trio
from attrs import define, field, frozen

from .events import ChildEvent, ChildEventKind, error_text
from .tree import Child, Tree

READY, NOT_STARTED = "up", "not started"
STATES = {
    ChildEventKind.STARTING: "starting",
    ChildEventKind.STARTED: READY,
    ChildEventKind.ENDED: "ended",
    ChildEventKind.FAILED: "failed",
    ChildEventKind.RESTARTING: "starts again",
    ChildEventKind.STOPPING: "stopping",
    ChildEventKind.STOPPED: "stopped",
    ChildEventKind.IGNORES_CANCEL: "does not stop",
    ChildEventKind.GAVE_UP: "gave up",
}
ERROR_LENGTH_MAX = 500


@frozen
class MemberStatus:
    """The status of one member of a tree: its state for `since_s` seconds, its restarts, and its last error."""

    path: str
    state: str
    restarts: int
    since_s: float
    about: str
    last_error: str  # empty if there was none


@define(eq=False)
class _Record:
    state: str = NOT_STARTED
    starts: int = 0
    since: float | None = None  # on Trio's clock
    last_error: str = ""


@frozen
class EarlierFailures:
    """Failures of earlier processes of this tree, counted by a launcher, and the last error."""

    count: int = 0
    last_error: str = ""


NO_FAILURES = EarlierFailures()


@define(eq=False)
class TreeStatus:
    """The status of one tree; its memory is bounded by the fixed number of members."""

    tree: Tree
    earlier_failures: EarlierFailures = NO_FAILURES
    _begun_at: float | None = None
    _records: dict[str, _Record] = field(factory=dict)  # by path

    def on_event(self, event: ChildEvent) -> None:
        """Apply an event."""
        if self._begun_at is None:
            self._begun_at = event.at
        record = self._records.setdefault(event.path, _Record())
        if (state := STATES[event.kind]) != record.state:
            record.state, record.since = state, event.at
        record.starts += event.kind is ChildEventKind.STARTING
        if event.error is not None:
            record.last_error = error_text(event.error)[:ERROR_LENGTH_MAX]

    def last_error(self, path: str) -> str:
        """Return the last error of the child at `path`, empty if there was none."""
        return self._records.get(path, _Record()).last_error

    @property
    def uptime_s(self) -> float:
        """The seconds since the first event, the start included."""
        return 0.0 if self._begun_at is None else trio.current_time() - self._begun_at

    def members(self) -> tuple[MemberStatus, ...]:
        """Return the status of every member of the tree, each before its children."""
        return tuple(self._members(self.tree, self.tree.name))

    def _members(self, member: Child | Tree, path: str) -> Iterator[MemberStatus]:
        record = self._records.get(path, _Record())
        restarts, last_error = max(0, record.starts - 1), record.last_error
        if path == self.tree.name:
            restarts += self.earlier_failures.count
            last_error = last_error or self.earlier_failures.last_error[:ERROR_LENGTH_MAX]
        state, since = record.state, record.since
        children = member.children if isinstance(member, Tree) else ()
        if path == self.tree.name and path not in self._records:  # the root has no parent that reports its events
            states = [self._state(f"{path}/{child.name}") for child in children]
            state, since = next((state for state in states if state != READY), READY), self._begun_at
        since_s = 0.0 if since is None else max(0.0, trio.current_time() - since)
        yield MemberStatus(path, state, restarts, round(since_s, 3), member.about, last_error)
        for child in children:
            yield from self._members(child, f"{path}/{child.name}")

    def _state(self, path: str) -> str:
        return self._records.get(path, _Record()).state
