"""Random trees whose children fail at random keep the promises of supervision."""

from __future__ import annotations

import random
from math import inf
from typing import Any

import pytest
import trio
from attrs import evolve

from protocol.errors import StartFailed
from supervisor.supervision.events import ChildEvent, ChildEventKind
from supervisor.supervision.supervise import RestartsExceeded, supervise
from supervisor.supervision.tree import Backoff, Child, Restart, Strategy, Tree
from tests.rig.scheduler import simulate

ONE = Strategy.ONE_FOR_ONE
PERMANENT, TRANSIENT, TEMPORARY = Restart

START_WITHIN_S, STOP_WITHIN_S, UNCANCELLABLE_S = 5, 3, 8
HEALS_AT, WELL_AT = 60, 200


class RandomTree:
    """A random tree whose children fail at random until the world heals, and what must hold all the while."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.members: dict[str, Any] = {}  # path -> Child or Tree
        self.running: set[str] = set()  # as the children see it
        self.state = {"t": "ready"}  # as the supervisor reports it: path -> starting, ready, stopping or over
        self.uncancellable: set[str] = set()
        self.begun: dict[str, set[str]] = {}  # path of a tree -> which children it has started, in its current life
        self.restarts: dict[str, list[float]] = {}  # path of a tree -> when it restarted what, in its current life
        self.broken: list[AssertionError] = []
        self.tree = self.make_tree("t", 0)

    def make_tree(self, path: str, depth: int) -> Tree:
        rng = self.rng
        children: list[Child | Tree] = []
        strategy = rng.choice(list(Strategy))
        for number in range(rng.randint(1, 4)):
            inner = f"{path}/{number}"
            nested = depth < 2 and rng.random() < 0.3
            member = self.make_tree(inner, depth + 1) if nested else self.make_child(inner)
            if strategy is ONE and rng.random() < 0.7:
                member = evolve(member, needs=tuple(child.name for child in children if rng.random() < 0.3))
            self.members[inner] = member
            children.append(member)
        restarts_max = rng.choice([None, rng.randint(0, 6)]) if depth else rng.choice([8, 40])
        crashes = restarts_max is None or rng.random() < 0.5
        self.members[path] = member = Tree(
            name=path.rpartition("/")[2],
            children=tuple(children),
            strategy=strategy,
            restarts_max=restarts_max,
            restarts_window_s=rng.choice([5, 10]),
            restart=rng.choice([PERMANENT, PERMANENT, TRANSIENT, TEMPORARY]),
            backoff=Backoff(min_s=0.25, max_s=4, jitter=0.5, reset_after_s=20, crashes=crashes),
        )
        return member

    def make_child(self, path: str) -> Child:
        self.members[path] = child = Child(
            name=path.rpartition("/")[2],
            run=self.live,
            args=(path,),
            restart=self.rng.choice([PERMANENT, PERMANENT, PERMANENT, TRANSIENT, TEMPORARY]),
            start_within_s=START_WITHIN_S,
            stop_within_s=STOP_WITHIN_S,
        )
        return child

    async def live(self, path: str, *, task_status: trio.TaskStatus[None]) -> None:
        chance = self.rng.random
        assert path not in self.running
        self.running.add(path)
        try:
            faulty = 1 < trio.current_time() < HEALS_AT
            if faulty and chance() < 0.3:
                await trio.sleep(self.rng.choice([1, 2, 7]))
            if faulty and chance() < 0.15:
                raise OSError("no device")
            task_status.started()
            await trio.sleep(self.rng.choice([0, 1, 3, 10, inf]) if faulty or trio.current_time() <= 1 else inf)
            if chance() < 0.8:
                raise ValueError("it broke")
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(self.rng.choice([0] * 9 + [0.5, 1, UNCANCELLABLE_S]))
            self.running.remove(path)

    def on_event(self, event: ChildEvent) -> None:
        try:
            self.check(event)
        except AssertionError as error:  # from here it would only be logged
            self.broken.append(error)

    def check(self, event: ChildEvent) -> None:
        path, kind = event.path, event.kind
        parent = path.rpartition("/")[0]
        match kind:
            case ChildEventKind.STARTING:
                self.check_start(path, parent)
                self.state[path], self.restarts[path], self.begun[path] = "starting", [], set()
                self.begun.setdefault(parent, set()).add(path)
            case ChildEventKind.STARTED:
                assert self.state[path] == "starting"
                self.state[path] = "ready"
            case ChildEventKind.STOPPING:
                self.check_stop(path, parent)
                self.state[path] = "stopping"
                if any(late_path.startswith(f"{path}/") for late_path in self.uncancellable):
                    self.uncancellable.add(path)
            case ChildEventKind.IGNORES_CANCEL:
                assert path not in self.uncancellable
                above = [path[:at] for at, letter in enumerate(path) if letter == "/"]
                self.uncancellable |= {path, *(tree for tree in above if self.state[tree] == "stopping")}
            case ChildEventKind.STOPPED:
                assert self.state[path] == "stopping"
                self.state[path] = "over"
                self.uncancellable.discard(path)
            case ChildEventKind.ENDED | ChildEventKind.FAILED if not str(event.error).startswith(
                f"{path} was not ready"
            ):
                assert self.state[path] in ("starting", "ready")
                self.state[path] = "over"
            case ChildEventKind.RESTARTING:
                times = self.restarts.setdefault(parent, [])
                times.append(event.at)
                spec = self.members[parent]
                recent = [at for at in times if at >= event.at - spec.restarts_window_s]
                assert spec.restarts_max is None or len(recent) <= spec.restarts_max
                assert self.members[path].restart is not TEMPORARY

    def needed(self, path: str, parent: str) -> set[Any]:
        return {f"{parent}/{name}" for name in self.members[parent].transitive_needs()[path.rpartition("/")[2]]}

    def check_start(self, path: str, parent: str) -> None:
        assert self.state[parent] in ("starting", "ready")  # a tree inside lives on until it is its turn
        assert self.state.get(path, "over") == "over"
        if self.members[parent].strategy is ONE and path in self.begun.get(parent, ()):
            return  # a restart waits for nobody
        for other in self.needed(path, parent):
            member = self.members[other]
            tries_again = isinstance(member, Tree) and member.restarts_max is None
            if member.restart is PERMANENT and not tries_again:
                assert self.state[other] == "ready"

    def check_stop(self, path: str, parent: str) -> None:
        if self.members[parent].strategy is ONE and self.state[path] == "starting":
            return  # it is too slow; or the tree stops, and then nothing that needs it was started
        for child in self.members[parent].children:
            other = f"{parent}/{child.name}"
            if path in self.needed(other, parent) and self.state.get(other, "over") != "over":
                assert self.state[other] == "stopping"
                assert any(f"{late_path}/".startswith(f"{other}/") for late_path in self.uncancellable)

    def check_all_is_well(self) -> None:
        """Everything runs that may be restarted, and none of whose trees is one that may not."""
        for path, member in self.members.items():
            names = path.split("/")
            trees = [self.members["/".join(names[:length])] for length in range(2, len(names))]
            lasting = member.restart is PERMANENT or (member.restart is TRANSIENT and isinstance(member, Tree))
            if path != "t" and lasting and TEMPORARY not in [above.restart for above in trees]:
                assert self.state[path] == "ready", path


async def any_tree(rng: random.Random) -> None:
    random_tree = RandomTree(rng)
    lives_long = rng.random() < 0.5
    cancel_at = WELL_AT if lives_long else rng.choice([rng.randint(0, 30), rng.uniform(0, 30)])
    async with trio.open_nursery() as nursery:

        async def cancel() -> None:
            await trio.sleep_until(cancel_at)
            if lives_long and not random_tree.broken:
                random_tree.check_all_is_well()
            random_tree.state["t"] = "stopping"
            nursery.cancel_scope.cancel()

        nursery.start_soon(cancel)
        try:
            await supervise(random_tree.tree, rng=rng, on_event=random_tree.on_event)
        except (RestartsExceeded, StartFailed):
            nursery.cancel_scope.cancel()
            cancel_at = inf
    if random_tree.broken:
        raise random_tree.broken[0]
    assert not random_tree.running
    assert trio.current_time() <= cancel_at + random_tree.tree.stop_within_s + UNCANCELLABLE_S


@pytest.mark.parametrize(
    "seeds", [range(100), pytest.param(range(100, 1000), marks=pytest.mark.nightly)], ids=["fast", "nightly"]
)
def test_any_tree_keeps_its_promises_under_any_faults(seeds: range, unlogged: None) -> None:
    for seed in seeds:
        simulate(any_tree, seed)
