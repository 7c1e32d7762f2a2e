"""A supervision tree of scripted children, and the list of its events."""

from __future__ import annotations

from math import inf
from typing import Any

import trio
from attrs import frozen

from supervisor.supervision.events import ChildEvent, ChildEventKind
from supervisor.supervision.supervise import RandomSource, supervise
from supervisor.supervision.tree import Child, Restart, Strategy, Tree

ONE, REST, ALL = Strategy.ONE_FOR_ONE, Strategy.REST_FOR_ONE, Strategy.ONE_FOR_ALL
PERMANENT, TRANSIENT, TEMPORARY = Restart


class Chances:
    """A source of random numbers that draws the given numbers, and then zeros."""

    def __init__(self, *numbers: float) -> None:
        self.numbers = list(numbers)

    def random(self) -> float:
        return self.numbers.pop(0) if self.numbers else 0.0


IT_BROKE = ValueError("it broke")


@frozen
class Life:
    """What a scripted child does in one life."""

    ready_after_s: float = 0
    lasts_s: float = inf
    error: Exception | None = IT_BROKE  # at the end; None: it just ends
    starts: bool = True
    cleans_up_s: float = 0  # or how long it ignores its cancellation


FAILS_TO_START = Life(starts=False)


def child(name: str, *lives: Life, **fields: Any) -> Child:
    """Return a child that lives the given lives, then for ever."""
    left = list(lives)

    async def run(*, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        life = left.pop(0) if left else Life()
        try:
            await trio.sleep(life.ready_after_s)
            if not life.starts:
                raise OSError("no device")
            task_status.started()
            await trio.sleep(life.lasts_s)
            if life.error is not None:
                raise type(life.error)(*life.error.args)
        finally:
            if life.cleans_up_s:
                with trio.CancelScope(shield=True):
                    await trio.sleep(life.cleans_up_s)

    return Child(name=name, run=run, **fields)


def tree(*children: Child | Tree, name: str = "t", **fields: Any) -> Tree:
    return Tree(name=name, children=children, **fields)


def fails_every(seconds: int, name: str = "a", **fields: Any) -> Child:
    return child(name, *[Life(lasts_s=seconds)] * 99, **fields)


class EventLog:
    """The events of a tree; `lines` has each as `time path KIND`."""

    def __init__(self) -> None:
        self.all: list[ChildEvent] = []

    def __call__(self, event: ChildEvent) -> None:
        assert event.at == trio.current_time()
        self.all.append(event)

    def lines(self, *kinds: ChildEventKind) -> list[str]:
        return [f"{x.at:g} {x.path} {x.kind.name}" for x in self.all if not kinds or x.kind in kinds]

    def starts(self) -> list[str]:
        return [f"{x.at:g} {x.path.rpartition('/')[2]}" for x in self.all if x.kind is ChildEventKind.STARTED]

    def stops(self) -> list[str]:
        return [f"{x.at:g} {x.path.rpartition('/')[2]}" for x in self.all if x.kind is ChildEventKind.STOPPED]

    def waits(self) -> list[float]:
        return [x.wait_s for x in self.all if x.kind is ChildEventKind.RESTARTING]


def restarting(*lives: Life, **fields: Any) -> Child:
    """Return a child that fails after 1 s and then lives the given lives."""
    return child("a", Life(lasts_s=1), *lives, **fields)


def listed(*lines: str) -> list[str]:
    """Return the events of these lines, which commas part."""
    return [event for line in lines for event in line.split(", ")]


async def supervised(
    tree: Tree, seconds: float = 99_999, rng: RandomSource | None = None, events: EventLog | None = None
) -> EventLog:
    """Supervise the tree, cancel it after so many seconds, and return its events."""
    events = events or EventLog()
    with trio.move_on_after(seconds):
        await supervise(tree, rng=rng or Chances(), on_event=events)
    return events
