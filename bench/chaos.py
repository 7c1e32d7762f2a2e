"""Nodes that die, stop, are told to end and lose their links, at random and under load: is any answer wrong?

A front and three workers with simulated engines, each node a process; the workers are reached through proxies that cut.
Every client compares what it hears with what a quiet cluster said: an answer is whole or ends in an error. Whatever has
died is started again. In the end all is healed: every engine is asked again, nothing is held, every node ends well.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from random import Random
from threading import Event, Thread

from bench import _checked
from bench._checked import Ask, Door, Tally
from bench._cluster import FRONT, Cluster, Plan, cluster, simulated
from bench._cutter import Cutter
from bench._node import Node, place

CLIENTS = 32
EVERY_S = 1.5  # between two faults, on the average
DRAIN_S = 2.0
ENDS_WITHIN_S = 15.0  # after a signal
DOWN_S = (0.1, 2.0)  # before a node that died is started again
STOPPED_S = (0.1, 8.0)  # some shorter than the silence after which a node counts as lost, some longer
REFUSED_S = (0.5, 3.0)
HEALED_WITHIN_S = 60.0
IDLE_WITHIN_S = 20.0
COSTS = {"fixed_s": 0.03, "per_prefill_token_s": 0.0005, "transfer_s": 0.05}
GATEWAY = "first_token_s = 30.0\ntotal_s = 50.0\n"

FAULTS = {
    "kill a worker": 8,
    "stop a worker": 8,
    "SIGTERM a worker": 8,
    "cut a link": 10,
    "hold a link": 8,
    "refuse links": 4,
    "kill the front": 1,
    "stop the front": 2,
    "SIGTERM the front": 1,
}


def plan(*, pair: bool) -> Plan:
    """Return the cluster: three workers alike, or a prefill, a decode and one that computes both."""
    legs = {"w1": "prefill", "w2": "decode", "w3": "both"} if pair else dict.fromkeys(("w1", "w2", "w3"), "both")
    engines = {
        name: simulated(name, leg, slots=CLIENTS, costs=COSTS, length_min=16, length_max=96)
        for name, leg in legs.items()
    }
    return Plan(engines, gateway=GATEWAY, drain_s=DRAIN_S)


@dataclass
class Chaos:
    """What is being done to a cluster, and what is planned."""

    of: Cluster
    cutters: dict[str, Cutter]
    chance: Random
    done: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    door: Door = field(default_factory=Door)
    _agenda: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: count = field(default_factory=count)
    _busy: dict[str, str] = field(default_factory=dict)  # what is being done to a node
    _told: dict[str, float] = field(default_factory=dict)  # when it was told to end
    _written: Counter[str] = field(default_factory=Counter)  # characters that a node had logged before its latest start

    def run(self, seconds: float) -> None:
        """Do harm for so long, then heal everything that can be healed at once."""
        begin = time.monotonic()
        self._later(0.5, self._next)
        while time.monotonic() - begin < seconds:
            self._turn()
            time.sleep(0.02)
        self._agenda = [each for each in self._agenda if each[2] != self._next]
        deadline = time.monotonic() + ENDS_WITHIN_S + STOPPED_S[1]
        while (self._agenda or self._busy) and time.monotonic() < deadline:
            self._turn()
            time.sleep(0.02)
        for cutter in self.cutters.values():
            cutter.heal()

    def _turn(self) -> None:
        while self._agenda and self._agenda[0][0] <= time.monotonic():
            heappop(self._agenda)[2]()
        for name, node in list(self.of.nodes.items()):
            if node.process.poll() is not None and self._busy.get(name) != "down":
                self._ended(name, node)
        for name, since in list(self._told.items()):
            if time.monotonic() - since > DRAIN_S + ENDS_WITHIN_S:
                self._say(name, f"did not end within {ENDS_WITHIN_S:g} s of its drain's end")
                del self._told[name]
                self.of.nodes[name].signal(signal.SIGKILL)

    def _later(self, after_s: float, do: Callable[[], None]) -> None:
        heappush(self._agenda, (time.monotonic() + after_s, next(self._numbers), do))

    def _say(self, name: str, what: str) -> None:
        self.bad.append(f"node {name} {what}\n{self.of.nodes[name].output()[-1500:]}")

    # Harm --------------------------------------------------------------------------------

    def _next(self) -> None:
        self._later(self.chance.expovariate(1 / EVERY_S), self._next)
        fault = self.chance.choices(list(FAULTS), list(FAULTS.values()))[0]
        what, _, whom = fault.partition(" ")
        if whom in {"a link", "links"}:
            self._harm_link(fault, self.chance.choice(list(self.cutters)))
            return
        names = [FRONT] if whom == "the front" else self.of.workers
        free = [name for name in names if name not in self._busy and self.of.nodes[name].process.poll() is None]
        if free:
            self.done[fault] += 1
            {"kill": self._kill, "stop": self._stop, "SIGTERM": self._tell}[what](self.chance.choice(free))

    def _harm_link(self, fault: str, name: str) -> None:
        cutter = self.cutters[name]
        if fault == "refuse links":
            self.done[fault] += 1
            cutter.refuse(self.chance.uniform(*REFUSED_S))
        elif fault == "cut a link":
            self.done[fault] += cutter.cut(self.chance, reset=self.chance.random() < 0.5)
        elif (held := cutter.hold(self.chance)) is not None:
            self.done[fault] += 1
            self._later(self.chance.uniform(*STOPPED_S), held.flows.set)

    def _kill(self, name: str) -> None:
        self._busy[name] = "killed"
        if name == FRONT:
            self.door = replace(self.door, killed=_odd(self.door.killed + 1))
        self.of.nodes[name].signal(signal.SIGKILL)

    def _stop(self, name: str) -> None:
        self._busy[name] = "stopped"
        self.of.nodes[name].signal(signal.SIGSTOP)
        self._later(self.chance.uniform(*STOPPED_S), lambda: self._go_on(name))

    def _go_on(self, name: str) -> None:
        del self._busy[name]
        self.of.nodes[name].signal(signal.SIGCONT)

    def _tell(self, name: str) -> None:
        self._busy[name] = "told"
        if name == FRONT:
            self.door = replace(self.door, told=_odd(self.door.told + 1))
        self._told[name] = time.monotonic()
        self.of.nodes[name].look()
        self.of.nodes[name].signal(signal.SIGTERM)

    def _ended(self, name: str, node: Node) -> None:
        why, code = self._busy.get(name), node.process.returncode
        self._told.pop(name, None)
        if why is None or why == "stopped":
            self._say(name, f"ended by itself, by {code}")
        elif why == "told":
            # Before anything has begun, a signal just kills, and nobody has yet swept what the one before had left.
            began = '"happening"' in node.output()[self._written[name] :]
            if code != 0 and (began or code != -signal.SIGTERM):
                self._say(name, f"was told to end and ended by {code}")
            if began and (left := node.left()):
                self._say(name, f"left {left}")
        self._busy[name] = "down"
        self._later(self.chance.uniform(*DOWN_S), lambda: self._start(name))

    def _start(self, name: str) -> None:
        del self._busy[name]
        self._written[name] = len(self.of.nodes[name].output())
        self.of.start(name)
        self.done["started again"] += 1
        if name == FRONT:
            self._later(0.0, self._wait_front)

    def _wait_front(self) -> None:
        if self.of.front.process.poll() is None and self.of.front.get("/health", timeout_s=0.5)[0] == 0:
            self._later(0.05, self._wait_front)
        elif self.of.front.process.poll() is None:
            self.door = Door(self.door.killed + self.door.killed % 2, self.door.told + self.door.told % 2)


def _odd(number: int) -> int:
    return number + (number + 1) % 2


# What must hold in the end ---------------------------------------------------------------


def aftermath(of: Cluster, right: dict[tuple[str, int | None], _checked.Said]) -> list[str]:
    """Return what does not hold of a cluster that was healed."""
    found = []
    try:
        print(f"all engines can be asked {of.wait_ready(HEALED_WITHIN_S):.1f} s after the last harm")
    except RuntimeError as error:
        return [str(error)]
    found += [f"{IDLE_WITHIN_S:g} s later {each}" for each in of.wait_idle(IDLE_WITHIN_S)]
    used: set[str] = set()
    asks = [Ask("stream", prompt, None) for prompt in _checked.PROMPTS] * 6
    with ThreadPoolExecutor(len(asks)) as pool:
        answers = [pool.submit(_checked.ask, of.front.port, each) for each in asks]
        while not all(answer.done() for answer in answers):
            used |= {name for name in of.workers if (counts := of.counts(name)) and counts["running"]}
    for asked, answer in zip(asks, answers, strict=True):
        _, why = _checked.verdict(asked, answer.result(), right[asked.prompt, None], left=False, door=Door())
        if why or not answer.result().whole:
            found.append(f"not served in the end: {why or answer.result()}")
    print(f"{len(asks)} more requests were computed by {', '.join(sorted(used))}")
    pair = any("leg =" in text for text in of.plan.engines.values())  # then whoever computes both is only a reserve
    if idle := {name for name, text in of.plan.engines.items() if not pair or "leg =" in text} - used:
        found.append(f"nobody asked {', '.join(sorted(idle))}")
    found += [f"at rest {each}" for each in of.wait_idle(IDLE_WITHIN_S)]
    return found + of.stop(ENDS_WITHIN_S)


def bugs(of: Cluster) -> list[str]:
    """Return the traces of bugs in what the nodes have logged, each kind once with how often it came."""
    kinds: Counter[str] = Counter()
    samples: dict[str, str] = {}
    for name, node in of.nodes.items():
        for line in node.output().splitlines():
            if '"traceback"' not in line and '"level": "error"' not in line and "Traceback" not in line:
                continue
            try:
                said = json.loads(line)
            except ValueError:
                said = {"event": line}
            last = str(said.get("traceback", "")).strip().rpartition("\n")[2]
            kind = f"{said.get('event')}: {last}"
            kinds[kind] += 1
            samples.setdefault(kind, f"node {name}: {said.get('traceback') or line}")
    return [f"{number} times {kind}\n{samples[kind][-3000:]}" for kind, number in kinds.items()]


def storm(of: Cluster, cutters: dict[str, Cutter], seconds: float, seed: int) -> int:
    """Run the load and the harm, print what came of it, and return how much was bad."""
    tally, over = Tally(), Event()
    right = _checked.references(of.front.port)
    chaos = Chaos(of, cutters, Random(seed))
    clients = [
        Thread(
            target=_checked.client,
            args=(tally, of.front.port, Random(seed * 1000 + number), right, over, lambda: chaos.door),
            daemon=True,
        )
        for number in range(CLIENTS)
    ]
    for each in clients:
        each.start()
    chaos.run(seconds)
    over.set()
    for each in clients:
        each.join(_checked.NEVER_S + 30.0)
    never = sum(each.is_alive() for each in clients)
    bad = chaos.bad + tally.bad + [f"{never} clients never ended"] * bool(never)
    print(f"{tally.requests} requests; the slowest took {tally.slowest_s:.1f} s")
    print("\n".join(tally.lines()))
    print("harm: " + ", ".join(f"{fault} {times}" for fault, times in sorted(chaos.done.items())))
    bad += aftermath(of, right)
    bad += bugs(of)
    for line in bad:
        print(f"BAD: {line}\n")
    print(f"{len(bad)} bad; seed {seed}")
    return len(bad)


def main() -> int:
    """Run for so many minutes, and return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--pair", action="store_true", help="a prefill, a decode and one that computes both")
    parser.add_argument("--logs", help="a folder to which the nodes' logs are copied in the end")
    arguments = parser.parse_args()
    cutters: dict[str, Cutter] = {}

    def behind_cutters(of: Cluster) -> None:
        for name in of.workers:
            cutters[name] = Cutter(of.links[name])
            of.doors[name] = cutters[name].port

    with place() as folder, cluster(folder, plan(pair=arguments.pair), before=behind_cutters) as of:
        bad = storm(of, cutters, 60 * arguments.minutes, arguments.seed)
        for cutter in cutters.values():
            cutter.close()
        if arguments.logs:
            keep_logs(of, arguments.logs)
    return 1 if bad else 0


def keep_logs(of: Cluster, folder: str) -> None:
    """Copy what the nodes have logged."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, node in of.nodes.items():
        (Path(folder) / f"{name}.log").write_text(node.output())


if __name__ == "__main__":
    sys.exit(main())
