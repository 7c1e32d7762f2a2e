"""Drain and restart every worker in turn under steady load: does any client notice?

A front and two workers with simulated engines. A worker is told to end, its streams finish or move to the other one
within its drain, it exits 0, and it is started again; then the other. Every answer is compared with the one that a
quiet cluster gave. Nobody is refused, nobody fails, nothing is truncated.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from signal import SIGTERM
from threading import Event, Thread

from bench import _checked
from bench._checked import Tally
from bench._cluster import Cluster, Plan, cluster, simulated
from bench._node import place

CLIENTS = 16
ENDS_WITHIN_S = 15.0
REST_S = 2.0  # between two restarts
COSTS = {"fixed_s": 0.03}
MOVED = re.compile(r'"event": "answers go on elsewhere", "count": (\d+)')


def plan(drain_s: float) -> Plan:
    """Return two workers, each of which can carry the whole load."""
    engines = {
        name: simulated(name, slots=2 * CLIENTS, costs=COSTS, length_min=16, length_max=160) for name in ("w1", "w2")
    }
    return Plan(engines, drain_s=drain_s)


@contextmanager
def steady(of: Cluster, clients: int, seed: int) -> Iterator[Tally]:
    """Keep so many clients asking while the body runs; yield what comes of it, whole once the body has ended."""
    right, tally, over = _checked.references(of.front.port), Tally(), Event()

    def run(number: int) -> None:
        _checked.client(tally, of.front.port, Random(seed * 1000 + number), right, over, leaves=0.0)

    threads = [Thread(target=run, args=(number,), daemon=True) for number in range(clients)]
    for each in threads:
        each.start()
    try:
        yield tally
    finally:
        over.set()
        for each in threads:
            each.join(_checked.NEVER_S + 10.0)
            if each.is_alive():
                tally.bad.append("a client never ended")


def renew(of: Cluster, name: str) -> dict[str, float]:
    """Drain one worker, wait for its end, and start it again; return how long each part took, in seconds, and moved."""
    node = of.nodes[name]
    node.look()
    before = len(node.output())
    since = time.perf_counter()
    node.signal(SIGTERM)
    drained_s = node.wait_exit(of.plan.drain_s + ENDS_WITHIN_S)
    if drained_s is None or node.process.returncode != 0:
        raise AssertionError(f"{name} ended by {node.process.returncode}:\n{node.output()[-2000:]}")
    if left := node.left():
        raise AssertionError(f"{name} left {left}")
    moved = sum(int(number) for number in MOVED.findall(node.output()[before:]))
    gone_s = time.perf_counter() - since
    of.start(name)
    of.wait_ready()
    return {"drained": drained_s, "back": time.perf_counter() - since - gone_s, "moved": moved}


def main() -> int:
    """Restart each worker so often, print what the clients heard, and return 1 if any of them noticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--drain", type=float, default=1.0, help="seconds; what has not finished by then must move")
    parser.add_argument("--seed", type=int, default=20)
    arguments = parser.parse_args()
    with place() as folder, cluster(folder, plan(arguments.drain)) as of:
        with steady(of, arguments.clients, arguments.seed) as tally:
            moved = 0.0
            print(f"{'worker':<8}{'drained s':>10}{'back s':>8}{'moved':>7}")
            for name in of.workers * arguments.rounds:
                time.sleep(REST_S)
                took = renew(of, name)
                moved += took["moved"]
                print(f"{name:<8}{took['drained']:>10.2f}{took['back']:>8.2f}{took['moved']:>7g}", flush=True)
            time.sleep(REST_S)
        bad = list(tally.bad)
        whole = tally.counts["whole"]
        bad += [f"{held}" for held in of.wait_idle(10.0)]
        bad += of.stop(ENDS_WITHIN_S)
    failed = sum(number for how, number in tally.counts.items() if how.startswith("error"))
    truncated = tally.requests - whole - failed
    print(f"{tally.requests} requests: {failed} failed, {truncated} truncated or wrong; {moved:g} answers were moved")
    print("\n".join(tally.lines()))
    for line in bad:
        print(f"BAD: {line}")
    return 1 if bad or failed or truncated else 0


if __name__ == "__main__":
    sys.exit(main())
