"""Faults of a cluster: a plan that a seed draws beforehand, and the code that carries it out.

The plan says when, what, to which of those who can be met, and for how long; who they are then depends on how fast the
cluster is. A node that dies is started again, as a launcher would, once nothing is left of its life before: no process
of it may outlive it by more than `GONE_WITHIN_S`, not counting the time for which that process was stopped. Only a node
whose own processes were harmed before it was up for the first time may end by itself: its start has failed.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from itertools import count
from random import Random

from bench.rig.checked_clients import GatewayInterruptions
from bench.rig.cluster import FRONT, Cluster, cluster_engine_name
from bench.rig.node import Node, ProcessEntry
from bench.rig.proxy import FaultProxy

SHUTDOWN_MAX_S = 15.0  # after its drain
GONE_WITHIN_S = 5.0  # what a dead node had started
DOWN_S = (0.1, 2.0)  # before a node that died is started again
FAULT_DURATION_S = (0.1, 8.0)  # some shorter than the silence after which a node counts as lost, some longer
REFUSED_S = (0.5, 3.0)
SLOW_S = (0.005, 0.05)  # after each piece
KILLED_INSTEAD = 0.15  # of what is stopped: it never goes on

NODES = {
    "kill a worker": 8,
    "stop a worker": 8,
    "SIGTERM a worker": 8,
    "cut a link": 8,
    "hold a link": 5,
    "half-open a link": 5,
    "slow a link": 4,
    "refuse links": 4,
    "kill the front": 2,
    "stop the front": 2,
    "SIGTERM the front": 2,
}
ENGINES = {
    "kill a host": 8,
    "stop a host": 6,
    "SIGTERM a host": 3,
    "kill a scheduler": 8,
    "stop a scheduler": 6,
    "SIGTERM a scheduler": 3,
    "kill a zygote": 2,
    **{fault: max(1, weight // 4) for fault, weight in NODES.items()},  # each costs an import of SGLang
}
BELOW = ("host", "scheduler", "zygote")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "SIGTERM": signal.SIGTERM}


@dataclass(frozen=True)
class PlannedFault:
    """One planned fault, with everything that is drawn for it."""

    at_s: float
    fault: str
    which: float  # of those to whom it can be done, as a share of one
    share: float  # of the longest that it may last
    number: int  # a seed of its own

    def one_of(self, names: Sequence[str]) -> str:
        """Return whom it meets."""
        return names[int(self.which * len(names))]

    def within(self, bounds: tuple[float, float]) -> float:
        """Return how long it lasts."""
        return bounds[0] + self.share * (bounds[1] - bounds[0])


def plan_faults(seed: int, seconds: float, every_s: float, faults: Mapping[str, int]) -> list[PlannedFault]:
    """Return the faults of so many seconds; the same arguments always give the same plan."""
    chance, found = Random(seed), list[PlannedFault]()
    at_s = 0.5
    while at_s < seconds:
        fault = chance.choices(list(faults), list(faults.values()))[0]
        found.append(PlannedFault(at_s, fault, chance.random(), chance.random(), chance.getrandbits(32)))
        at_s += chance.expovariate(1 / every_s)
    return found


@dataclass
class FaultInjector:
    """Carries a plan of faults out, and records what a node did that it must not do."""

    target: Cluster
    cutters: Mapping[str, FaultProxy]
    done: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    door: GatewayInterruptions = field(default_factory=GatewayInterruptions)
    _agenda: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)
    _busy: dict[str, str] = field(default_factory=dict)  # what is being done to a node
    _told: dict[str, float] = field(default_factory=dict)  # when it was told to end
    _down_s: dict[str, float] = field(default_factory=dict)  # how long a node is to stay away
    _written: Counter[str] = field(default_factory=Counter)  # characters that a node had logged before its latest start
    _stopped: dict[int, ProcessEntry] = field(default_factory=dict)  # processes below nodes
    _hurt: set[str] = field(default_factory=set)  # nodes of which something below was harmed in this life

    def run(self, plan: Sequence[PlannedFault], seconds: float) -> None:
        """Do harm for so long, then heal everything that can be healed at once."""
        for harm in plan:
            self._later(harm.at_s, partial(self._do, harm))
        self._until(seconds, lambda: True)
        self._until(self.target.plan.drain_s + SHUTDOWN_MAX_S + FAULT_DURATION_S[1] + GONE_WITHIN_S, self._unfinished)
        for cutter in self.cutters.values():
            cutter.heal()

    def _unfinished(self) -> bool:
        return bool(self._agenda or self._busy or self._stopped)

    def _until(self, seconds: float, goes_on: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while goes_on() and time.monotonic() < deadline:
            while self._agenda and self._agenda[0][0] <= time.monotonic():
                heappop(self._agenda)[2]()
            for name, node in list(self.target.nodes.items()):
                if node.process.poll() is not None and self._busy.get(name) != "down":
                    self._ended(name, node)
            self._remind()
            time.sleep(0.02)

    def _remind(self) -> None:
        for name, since in list(self._told.items()):
            if time.monotonic() - since > self.target.plan.drain_s + SHUTDOWN_MAX_S:
                self._say(name, f"did not end within {SHUTDOWN_MAX_S:g} s of its drain's end")
                del self._told[name]
                self.target.nodes[name].signal(signal.SIGKILL)

    def _later(self, after_s: float, do: Callable[[], None]) -> None:
        heappush(self._agenda, (time.monotonic() + after_s, next(self._numbers), do))

    def _say(self, name: str, what: str) -> None:
        self.bad.append(f"node {name} {what}\n{self.target.nodes[name].output()[-1500:]}")

    # Harm --------------------------------------------------------------------------------

    def _do(self, harm: PlannedFault) -> None:
        what, *_, whom = harm.fault.split()
        if whom in {"link", "links"}:
            met = self._harm_link(what, harm)
        elif whom in BELOW:
            met = self._harm_below(what, whom, harm)
        else:
            met = self._harm_node(what, [FRONT] if whom == FRONT else self.target.workers, harm)
        self.done[harm.fault] += met

    def _harm_link(self, what: str, harm: PlannedFault) -> bool:
        cutter, chance = self.cutters[harm.one_of(list(self.cutters))], Random(harm.number)
        if what == "refuse":
            cutter.refuse(harm.within(REFUSED_S))
            return True
        if what == "cut":
            return cutter.cut(chance, reset=chance.random() < 0.5)
        if what == "slow":
            met = cutter.slow(chance, chance.uniform(*SLOW_S))
        else:
            met = cutter.hold(chance, one_way=what == "half-open")
        if met is not None:
            self._later(harm.within(FAULT_DURATION_S), met.flow)
        return met is not None

    def _harm_node(self, what: str, names: Sequence[str], harm: PlannedFault) -> bool:
        free = [name for name in names if name not in self._busy and self.target.nodes[name].process.poll() is None]
        if not free:
            return False
        name = harm.one_of(free)
        node, self._down_s[name] = self.target.nodes[name], harm.within(DOWN_S)
        node.look()  # at what must be gone soon
        if what == "stop":
            self._busy[name] = "stopped"
            self._later(harm.within(FAULT_DURATION_S), lambda: self._go_on(name, harm))
        elif what == "kill":
            self._killing(name)
        else:
            self._busy[name] = "told"
            self._told[name] = time.monotonic()
            if name == FRONT:
                self.door = replace(self.door, told=_odd(self.door.told + 1))
        node.signal(SIGNALS[what])
        return True

    def _killing(self, name: str) -> None:
        self._busy[name] = "killed"
        if name == FRONT:
            self.door = replace(self.door, killed=_odd(self.door.killed + 1))

    def _go_on(self, name: str, harm: PlannedFault) -> None:
        if self.target.nodes[name].process.poll() is not None:
            return  # it ended by itself, stopped as it was: `_ended` says so
        if killed := Random(harm.number).random() < KILLED_INSTEAD:
            self._killing(name)
            self.done["killed while stopped"] += 1
        else:
            del self._busy[name]
        self.target.nodes[name].signal(signal.SIGKILL if killed else signal.SIGCONT)

    def _harm_below(self, what: str, role: str, harm: PlannedFault) -> bool:
        """Harm a process that a node has started; the node may be stopped itself, or about to end."""
        living = {
            name: self.target.nodes[name].look() for name in self.target.workers if self._busy.get(name) != "down"
        }
        found = [name for name, seen in living.items() if role in seen and seen[role].pid not in self._stopped]
        if not found:
            return False
        name = harm.one_of(found)
        seen = living[name][role]
        self._hurt.add(name)
        with suppress(ProcessLookupError):
            os.kill(seen.pid, SIGNALS[what])
        if what == "stop":
            self._stopped[seen.pid] = seen
            self._later(harm.within(FAULT_DURATION_S), lambda: self._go_on_below(seen))
        return True

    def _go_on_below(self, seen: ProcessEntry) -> None:
        del self._stopped[seen.pid]
        if seen.lives:
            with suppress(ProcessLookupError):
                os.kill(seen.pid, signal.SIGCONT)

    # What follows ------------------------------------------------------------------------

    def _ended(self, name: str, node: Node) -> None:
        why, code = self._busy.get(name), node.process.returncode
        said = node.output()[self._written[name] :]
        self._told.pop(name, None)
        if why is None or why == "stopped":
            was_up = f'"child": "{cluster_engine_name(name)}", "child_event": "started"' in said
            if code == 1 and name in self._hurt and not was_up:
                self.done["a start failed"] += 1
            else:
                self._say(name, f"ended by itself, by {code}")
        elif why == "told":
            # Before anything has begun, a signal just kills, and nobody has yet swept what the one before had left.
            began = '"child_event"' in said
            if code != 0 and (began or code != -signal.SIGTERM):
                self._say(name, f"was told to end and ended by {code}")
            if began and (left := node.left()):
                self._say(name, f"left {left}")
        self._busy[name] = "down"
        ended_at = time.monotonic()
        self._later(self._down_s.pop(name, DOWN_S[0]), lambda: self._start(name, ended_at))

    def _start(self, name: str, gone_since: float) -> None:
        """Start a node again once nothing of its life before is left."""
        node, now = self.target.nodes[name], time.monotonic()
        if left := node.alive():
            if any(seen.pid in self._stopped for seen in left):
                gone_since = now
            if now - gone_since < GONE_WITHIN_S:
                self._later(0.1, lambda: self._start(name, gone_since))
                return
            self._say(name, f"has ended, and {GONE_WITHIN_S:g} s later there are still {left}")
            for seen in left:
                with suppress(ProcessLookupError):
                    os.kill(seen.pid, signal.SIGKILL)
        del self._busy[name]
        self._hurt.discard(name)
        self._written[name] = len(node.output())
        self.target.start(name)
        self.done["started again"] += 1
        if name == FRONT:
            self._later(0.0, self._wait_front)

    def _wait_front(self) -> None:
        if self.target.front.process.poll() is None and self.target.front.get("/health", timeout_s=0.5)[0] == 0:
            self._later(0.05, self._wait_front)
        elif self.target.front.process.poll() is None:
            self.door = GatewayInterruptions(
                self.door.killed + self.door.killed % 2, self.door.told + self.door.told % 2
            )


def _odd(number: int) -> int:
    return number + (number + 1) % 2
