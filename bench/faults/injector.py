"""Faults of a cluster, injected beside each other: every node, engine process and link has a sequence of its own.

A sequence is a generator, which yields a condition to wait for; a seed decides its faults, pauses and durations. A dead
node is started again, as by a launcher, once all of its processes have ended: none may outlive it by more than
`GONE_WITHIN_S`, its own stopped time not counted. A node may end by itself only after a failed start: one of its
processes was hit before its engine was up.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

from bench.faults.proxy import FaultProxy
from bench.rig.checked_clients import GatewayInterruptions
from bench.rig.cluster import FRONT, Cluster, cluster_engine_name
from bench.rig.node import Node

SHUTDOWN_MAX_S = 15.0  # after its drain
GONE_WITHIN_S = 5.0  # the processes of a dead node
DOWN_S = (0.1, 2.0)  # before a node that died is started again
DURATION_S = (0.1, 8.0)  # of a stop or a silence, on both sides of that after which a node counts as lost
REFUSED_S = (0.5, 3.0)
SLOW_S = (0.005, 0.05)  # before each piece
KILLED_WHILE_STOPPED = 0.15  # of the stopped nodes, those that are killed instead of continued
POLL_S = 0.02

NODES = {
    "worker": {"kill": 8, "stop": 8, "SIGTERM": 8},
    "front": {"kill": 2, "stop": 2, "SIGTERM": 2},
    "link": {"cut": 8, "hold": 5, "half-open": 5, "slow": 4, "refuse": 4},
}
"""How often each fault happens beside the others, by its target."""
ENGINES = {
    "host": {"kill": 8, "stop": 6, "SIGTERM": 3},
    "scheduler": {"kill": 8, "stop": 6, "SIGTERM": 3},
    "zygote": {"kill": 2},
    **{target: {fault: max(1, each // 4) for fault, each in faults.items()} for target, faults in NODES.items()},
}
"""The same with real engines: each death of a node costs an import of SGLang."""

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "SIGTERM": signal.SIGTERM}

Steps = Generator[Callable[[], object], None, None]


def after(seconds: float) -> Callable[[], bool]:
    """Return the condition that so many seconds have passed."""
    until = time.monotonic() + seconds
    return lambda: time.monotonic() >= until


@dataclass
class FaultInjector:
    """Injects faults, starts dead nodes again, and records what a node must not have done."""

    target: Cluster
    proxies: Mapping[str, FaultProxy]
    done: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    interruptions: GatewayInterruptions = field(default_factory=GatewayInterruptions)
    _over: Callable[[], bool] = lambda: False  # whether no fault may begin any more
    _logged_before: Counter[str] = field(default_factory=Counter)  # characters, up to a node's latest start
    _stopped: set[int] = field(default_factory=set)  # processes of nodes
    _hit: set[str] = field(default_factory=set)  # nodes of which another process was hit since their start

    def run(self, faults: Mapping[str, Mapping[str, int]], every_s: float, seconds: float, seed: int) -> None:
        """Inject faults for so long, wait until every node is up again, then heal the connections."""
        weights, sequences = sum(sum(each.values()) for each in faults.values()), list[Steps]()
        for kind, chances in faults.items():
            names = [FRONT] if kind == "front" else self.target.workers
            mean_s = every_s * weights * len(names) / sum(chances.values())
            for name in names:
                sequences.append(self._sequence(kind, name, chances, mean_s, Random(f"{seed} {kind} {name}")))
        self._over = after(seconds)
        self.drive(sequences, seconds + self.target.plan.drain_s + SHUTDOWN_MAX_S + DURATION_S[1] + GONE_WITHIN_S)
        for proxy in self.proxies.values():
            proxy.heal()

    def drive(self, sequences: Iterable[Steps], seconds: float) -> None:
        """Run sequences beside each other until all have ended, or the time is over."""
        waiting = {sequence: next(sequence, None) for sequence in sequences}
        late = after(seconds)
        while waiting and not late():
            for sequence, holds in list(waiting.items()):
                if holds is None:
                    del waiting[sequence]
                elif holds():
                    waiting[sequence] = next(sequence, None)
            time.sleep(POLL_S)

    def _sequence(self, kind: str, name: str, chances: Mapping[str, int], mean_s: float, chance: Random) -> Steps:
        """Inject one fault of a target after the other, until the time is over."""
        while not self._over():
            pause = after(chance.expovariate(1 / mean_s))
            yield partial(self._is_disturbed, kind, name, pause)
            if kind in {"worker", "front"} and self.target.nodes[name].process.poll() is not None:
                yield from self._ended_by_itself(name, chance)
            elif not self._over():
                fault = chance.choices(list(chances), list(chances.values()))[0]
                self.done[f"{fault} {kind}"] += 1
                if kind == "link":
                    yield from self.link_fault(name, fault, chance)
                elif kind in {"worker", "front"}:
                    yield from self.node_fault(name, fault, chance)
                else:
                    yield from self._process_fault(name, kind, fault, chance)

    def _is_disturbed(self, kind: str, name: str, pause: Callable[[], bool]) -> bool:
        ended = kind in {"worker", "front"} and self.target.nodes[name].process.poll() is not None
        return ended or self._over() or pause()

    def _record(self, name: str, what: str) -> None:
        self.bad.append(f"node {name} {what}\n{self.target.nodes[name].output()[-1500:]}")

    # Faults ------------------------------------------------------------------------------

    def link_fault(self, name: str, fault: str, chance: Random) -> Steps:
        """Cut a connection of a node, hold or slow it for a while, or refuse all of them."""
        if fault == "refuse":
            self.proxies[name].refuse(chance.uniform(*REFUSED_S))
            return
        if (connection := self.proxies[name].choose(chance)) is None:
            return
        if fault == "cut":
            connection.cut(reset=chance.random() < 0.5)
            return
        if fault == "slow":
            connection.pause_s = chance.uniform(*SLOW_S)
        else:
            both = connection.directions
            connection.hold([chance.choice(both)] if fault == "half-open" else both)
        yield after(chance.uniform(*DURATION_S))
        connection.flow()

    def node_fault(self, name: str, fault: str, chance: Random) -> Steps:
        """Kill, stop or drain a node; start it again if it dies."""
        node = self.target.nodes[name]
        node.observe()  # the processes that must end with it
        if fault == "stop":
            node.signal(signal.SIGSTOP)
            goes_on = after(chance.uniform(*DURATION_S))
            yield lambda: goes_on() or node.process.poll() is not None
            if node.process.poll() is not None:
                yield from self._ended_by_itself(name, chance)
                return
            if chance.random() >= KILLED_WHILE_STOPPED:
                node.signal(signal.SIGCONT)
                return
            self.done["killed while stopped"] += 1
            fault = "kill"
        if name == FRONT:
            self._interrupt("kills" if fault == "kill" else "terminations")
        node.signal(SIGNALS[fault])
        late = after(self.target.plan.drain_s + SHUTDOWN_MAX_S)
        yield lambda: node.process.poll() is not None or late()
        if node.process.poll() is None:
            self._record(name, f"did not end within {SHUTDOWN_MAX_S:g} s of its drain's end")
            node.signal(signal.SIGKILL)
            yield lambda: node.process.poll() is not None
        elif fault == "SIGTERM":
            self._judge_shutdown(name, node)
        yield from self._start(name, chance)

    def _process_fault(self, name: str, role: str, fault: str, chance: Random) -> Steps:
        """Signal a process that a node has started; the node may itself be stopped, or about to end."""
        process = self.target.nodes[name].observe().get(role)
        if process is None or process.pid in self._stopped:
            return
        self._hit.add(name)
        with suppress(ProcessLookupError):
            os.kill(process.pid, SIGNALS[fault])
        if fault == "stop":
            self._stopped.add(process.pid)
            yield after(chance.uniform(*DURATION_S))
            self._stopped.remove(process.pid)
            if process.lives:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGCONT)

    def _interrupt(self, kind: str) -> None:
        """Count an interruption of the front, from its beginning: an odd number."""
        number: int = getattr(self.interruptions, kind)
        self.interruptions = replace(self.interruptions, **{kind: number + 1})

    # Restarts ----------------------------------------------------------------------------

    def _log(self, name: str) -> str:
        return self.target.nodes[name].output()[self._logged_before[name] :]

    def _ended_by_itself(self, name: str, chance: Random) -> Steps:
        code = self.target.nodes[name].process.returncode
        was_up = f'"child": "{cluster_engine_name(name)}", "child_event": "started"' in self._log(name)
        if code == 1 and name in self._hit and not was_up:
            self.done["a start failed"] += 1
        else:
            self._record(name, f"ended by itself, by {code}")
        if name == FRONT:
            self._interrupt("kills")
        yield from self._start(name, chance)

    def _judge_shutdown(self, name: str, node: Node) -> None:
        # Before its tree has begun, a signal just kills it, and its predecessor's leftovers may still be there.
        began, code = '"child_event"' in self._log(name), node.process.returncode
        if code != 0 and (began or code != -signal.SIGTERM):
            self._record(name, f"got SIGTERM and ended by {code}")
        if began and (left := node.leftovers()):
            self._record(name, f"left {left}")

    def _start(self, name: str, chance: Random) -> Steps:
        """Start a node again once no process of its last run lives."""
        node, gone_since = self.target.nodes[name], time.monotonic()
        yield after(chance.uniform(*DOWN_S))
        while living := node.living():
            if any(process.pid in self._stopped for process in living):
                gone_since = time.monotonic()
            if time.monotonic() - gone_since > GONE_WITHIN_S:
                self._record(name, f"has ended, and {GONE_WITHIN_S:g} s later there are still {living}")
                for process in living:
                    with suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)
                break
            yield after(0.1)
        self._hit.discard(name)
        self._logged_before[name] = len(node.output())
        self.target.start(name)
        self.done["started again"] += 1
        if name == FRONT:
            front = self.target.front
            yield lambda: front.process.poll() is not None or front.get("/health", timeout_s=0.5)[0] != 0
            if front.process.poll() is None:
                ended = {kind: number + number % 2 for kind, number in vars(self.interruptions).items()}
                self.interruptions = GatewayInterruptions(**ended)
