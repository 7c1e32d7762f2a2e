"""Faults of a cluster: a plan that a seed draws beforehand, and the injector that carries it out.

The plan has the time, kind and length of each fault, and which of the possible targets it hits; which ones are possible
then depends on how fast the cluster is. A node that dies is started again, as a launcher would, once all of its
processes have ended: none may outlive it by more than `GONE_WITHIN_S`, not counting the time for which that process was
stopped. A node may end by itself only if one of its processes was hit before its engine was up: its start has failed.
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
from bench.rig.node import Node
from bench.rig.processes import ProcessEntry
from bench.rig.proxy import FaultProxy

SHUTDOWN_MAX_S = 15.0  # after its drain
GONE_WITHIN_S = 5.0  # the processes of a dead node
DOWN_S = (0.1, 2.0)  # before a node that died is started again
FAULT_DURATION_S = (0.1, 8.0)  # on both sides of the silence after which a node counts as lost
REFUSED_S = (0.5, 3.0)
SLOW_S = (0.005, 0.05)  # before each piece
KILLED_WHILE_STOPPED = 0.15  # of the stopped nodes, those that are killed instead of continued

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
ROLES = ("host", "scheduler", "zygote")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "SIGTERM": signal.SIGTERM}


@dataclass(frozen=True)
class PlannedFault:
    """One planned fault, with every random number that it needs."""

    at_s: float
    kind: str
    which: float  # of the possible targets, as a share of one
    share: float  # of its longest duration
    seed: int  # for what is drawn when it happens

    def choose(self, names: Sequence[str]) -> str:
        """Return the target among the possible ones."""
        return names[int(self.which * len(names))]

    def duration_s(self, bounds: tuple[float, float]) -> float:
        """Return its duration within these bounds."""
        return bounds[0] + self.share * (bounds[1] - bounds[0])


def plan_faults(seed: int, seconds: float, every_s: float, faults: Mapping[str, int]) -> list[PlannedFault]:
    """Return the faults of so many seconds; the same arguments always give the same plan."""
    chance, plan = Random(seed), list[PlannedFault]()
    at_s = 0.5
    while at_s < seconds:
        kind = chance.choices(list(faults), list(faults.values()))[0]
        plan.append(PlannedFault(at_s, kind, chance.random(), chance.random(), chance.getrandbits(32)))
        at_s += chance.expovariate(1 / every_s)
    return plan


@dataclass
class FaultInjector:
    """Carries out a plan of faults, starts dead nodes again, and records what a node must not have done."""

    target: Cluster
    proxies: Mapping[str, FaultProxy]
    done: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    interruptions: GatewayInterruptions = field(default_factory=GatewayInterruptions)
    _agenda: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)
    _states: dict[str, str] = field(default_factory=dict)  # of a node: stopped, killed, terminated, down
    _terminated_at: dict[str, float] = field(default_factory=dict)  # when a node got SIGTERM
    _down_s: dict[str, float] = field(default_factory=dict)  # how long a node is to stay down
    _logged_before: Counter[str] = field(default_factory=Counter)  # characters, up to a node's latest start
    _stopped: dict[int, ProcessEntry] = field(default_factory=dict)  # processes of nodes, by pid
    _hit: set[str] = field(default_factory=set)  # nodes of which another process was hit since their start

    def run(self, plan: Sequence[PlannedFault], seconds: float) -> None:
        """Inject the faults for so long, wait until every node is up again, then heal the connections."""
        for fault in plan:
            self._later(fault.at_s, partial(self._inject, fault))
        self._run_for(seconds, lambda: True)
        self._run_for(self.target.plan.drain_s + SHUTDOWN_MAX_S + FAULT_DURATION_S[1] + GONE_WITHIN_S, self._unfinished)
        for proxy in self.proxies.values():
            proxy.heal()

    def _unfinished(self) -> bool:
        return bool(self._agenda or self._states or self._stopped)

    def _run_for(self, seconds: float, unfinished: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while unfinished() and time.monotonic() < deadline:
            while self._agenda and self._agenda[0][0] <= time.monotonic():
                heappop(self._agenda)[2]()
            for name, node in list(self.target.nodes.items()):
                if node.process.poll() is not None and self._states.get(name) != "down":
                    self._ended(name, node)
            self._kill_late_nodes()
            time.sleep(0.02)

    def _kill_late_nodes(self) -> None:
        for name, since in list(self._terminated_at.items()):
            if time.monotonic() - since > self.target.plan.drain_s + SHUTDOWN_MAX_S:
                self._record(name, f"did not end within {SHUTDOWN_MAX_S:g} s of its drain's end")
                del self._terminated_at[name]
                self.target.nodes[name].signal(signal.SIGKILL)

    def _later(self, after_s: float, do: Callable[[], None]) -> None:
        heappush(self._agenda, (time.monotonic() + after_s, next(self._numbers), do))

    def _record(self, name: str, what: str) -> None:
        self.bad.append(f"node {name} {what}\n{self.target.nodes[name].output()[-1500:]}")

    # Faults ------------------------------------------------------------------------------

    def _inject(self, fault: PlannedFault) -> None:
        action, *_, target = fault.kind.split()
        if target in {"link", "links"}:
            happened = self._inject_link(action, fault)
        elif target in ROLES:
            happened = self._inject_process(action, target, fault)
        else:
            happened = self._inject_node(action, [FRONT] if target == FRONT else self.target.workers, fault)
        self.done[fault.kind] += happened

    def _inject_link(self, action: str, fault: PlannedFault) -> bool:
        proxy, chance = self.proxies[fault.choose(list(self.proxies))], Random(fault.seed)
        if action == "refuse":
            proxy.refuse(fault.duration_s(REFUSED_S))
            return True
        if action == "cut":
            return proxy.cut(chance, reset=chance.random() < 0.5)
        if action == "slow":
            connection = proxy.slow(chance, chance.uniform(*SLOW_S))
        else:
            connection = proxy.hold(chance, one_way=action == "half-open")
        if connection is not None:
            self._later(fault.duration_s(FAULT_DURATION_S), connection.flow)
        return connection is not None

    def _inject_node(self, action: str, names: Sequence[str], fault: PlannedFault) -> bool:
        free = [name for name in names if name not in self._states and self.target.nodes[name].process.poll() is None]
        if not free:
            return False
        name = fault.choose(free)
        node, self._down_s[name] = self.target.nodes[name], fault.duration_s(DOWN_S)
        node.observe()  # the processes that must end with it
        if action == "stop":
            self._states[name] = "stopped"
            self._later(fault.duration_s(FAULT_DURATION_S), lambda: self._continue_node(name, fault))
        elif action == "kill":
            self._mark_killed(name)
        else:
            self._states[name] = "terminated"
            self._terminated_at[name] = time.monotonic()
            if name == FRONT:
                self.interruptions = replace(self.interruptions, terminations=_odd(self.interruptions.terminations + 1))
        node.signal(SIGNALS[action])
        return True

    def _mark_killed(self, name: str) -> None:
        self._states[name] = "killed"
        if name == FRONT:
            self.interruptions = replace(self.interruptions, kills=_odd(self.interruptions.kills + 1))

    def _continue_node(self, name: str, fault: PlannedFault) -> None:
        if self.target.nodes[name].process.poll() is not None:
            return  # it ended while it was stopped, which `_ended` records
        if killed := Random(fault.seed).random() < KILLED_WHILE_STOPPED:
            self._mark_killed(name)
            self.done["killed while stopped"] += 1
        else:
            del self._states[name]
        self.target.nodes[name].signal(signal.SIGKILL if killed else signal.SIGCONT)

    def _inject_process(self, action: str, role: str, fault: PlannedFault) -> bool:
        """Signal a process that a node has started; the node may itself be stopped, or about to end."""
        living = {
            name: self.target.nodes[name].observe() for name in self.target.workers if self._states.get(name) != "down"
        }
        names = [name for name, roles in living.items() if role in roles and roles[role].pid not in self._stopped]
        if not names:
            return False
        name = fault.choose(names)
        process = living[name][role]
        self._hit.add(name)
        with suppress(ProcessLookupError):
            os.kill(process.pid, SIGNALS[action])
        if action == "stop":
            self._stopped[process.pid] = process
            self._later(fault.duration_s(FAULT_DURATION_S), lambda: self._continue_process(process))
        return True

    def _continue_process(self, process: ProcessEntry) -> None:
        del self._stopped[process.pid]
        if process.lives:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)

    # Restarts ----------------------------------------------------------------------------

    def _ended(self, name: str, node: Node) -> None:
        state, code = self._states.get(name), node.process.returncode
        log = node.output()[self._logged_before[name] :]
        self._terminated_at.pop(name, None)
        if state is None or state == "stopped":
            was_up = f'"child": "{cluster_engine_name(name)}", "child_event": "started"' in log
            if code == 1 and name in self._hit and not was_up:
                self.done["a start failed"] += 1
            else:
                self._record(name, f"ended by itself, by {code}")
        elif state == "terminated":
            # Before its tree has begun, a signal just kills it, and its predecessor's leftovers may still be there.
            began = '"child_event"' in log
            if code != 0 and (began or code != -signal.SIGTERM):
                self._record(name, f"got SIGTERM and ended by {code}")
            if began and (left := node.leftovers()):
                self._record(name, f"left {left}")
        self._states[name] = "down"
        ended_at = time.monotonic()
        self._later(self._down_s.pop(name, DOWN_S[0]), lambda: self._start(name, ended_at))

    def _start(self, name: str, gone_since: float) -> None:
        """Start a node again once no process of its last run lives."""
        node, now = self.target.nodes[name], time.monotonic()
        if living := node.living():
            if any(process.pid in self._stopped for process in living):
                gone_since = now
            if now - gone_since < GONE_WITHIN_S:
                self._later(0.1, lambda: self._start(name, gone_since))
                return
            self._record(name, f"has ended, and {GONE_WITHIN_S:g} s later there are still {living}")
            for process in living:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        del self._states[name]
        self._hit.discard(name)
        self._logged_before[name] = len(node.output())
        self.target.start(name)
        self.done["started again"] += 1
        if name == FRONT:
            self._later(0.0, self._wait_front)

    def _wait_front(self) -> None:
        if self.target.front.process.poll() is None and self.target.front.get("/health", timeout_s=0.5)[0] == 0:
            self._later(0.05, self._wait_front)
        elif self.target.front.process.poll() is None:
            self.interruptions = GatewayInterruptions(
                _even(self.interruptions.kills), _even(self.interruptions.terminations)
            )


def _odd(number: int) -> int:
    return number + (number + 1) % 2


def _even(number: int) -> int:
    return number + number % 2
