"""Attacks on a cluster: nodes that are doubled, drained, stopped, or that fail whatever they are asked."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.attacks.scenario import Verdict, beside_honest_client
from bench.rig.cluster import Cluster, Plan, cluster, simulated
from bench.rig.node import MARK, free_port, started

COSTS = {"fixed_s": 0.05}
STOPPED_GAP_S_MAX = 3.5  # silent_s, and what it takes to go on elsewhere


@contextmanager
def attacked(folder: Path, verdict: Verdict, workers: int, tokens: int = 60, **faults: str) -> Iterator[Cluster]:
    """Run a cluster with an honest client beside it while the body attacks; `faults` are lines of a worker's engine.

    Each stream of the client has so many `tokens`.
    """
    engines = {f"w{number}": simulated(f"w{number}", slots=16, costs=COSTS) for number in range(workers)}
    for name, lines in faults.items():
        engines[name] += f"\n[engine.tiny-{name}.simulated.faults]\n{lines}\n"
    plan = Plan(engines, drain_s=2.0, front_drain_s=20.0)  # without keys: to know that all is up takes the metrics
    with (
        cluster(folder, plan) as target,
        beside_honest_client(folder, target.front.port, verdict, key="", tokens=tokens),
    ):
        yield target


def twins(folder: Path, verdict: Verdict) -> None:
    """Start a second process of the name of a node that lives."""
    with attacked(folder, verdict, 2) as target:
        place = target.folder / "twin"
        (place / "t").mkdir(parents=True)
        port = target.links["w0"]
        text = target.file("w0").replace(f"127.0.0.1:{port}", f"127.0.0.1:{free_port()}")
        text = text.replace(f"port = {target.windows['w0']}", f"port = {free_port()}")
        (place / "cluster.toml").write_text(text)
        with (place / "output").open("wb") as output:
            twin = started(
                ["--node", "w0", str(place / "cluster.toml")], output, {"TMPDIR": str(place / "t"), MARK: "twin"}
            )
        try:
            time.sleep(15.0)
        finally:
            twin.kill()
            twin.wait()
        said = (place / "output").read_text() + target.nodes["w0"].output() + target.front.output()
        verdict.said = "a log says why" if "two processes call themselves" in said else "no log says why"


def five_drains(folder: Path, verdict: Verdict) -> None:
    """Drain six workers one after the other, and start each again."""
    with attacked(folder, verdict, 6, tokens=400) as target:
        for name in target.workers[:5]:
            target.nodes[name].signal(signal.SIGTERM)
            target.nodes[name].wait_exit(20.0)
            target.start(name)
        verdict.said = "five drains"


def black_hole(folder: Path, verdict: Verdict) -> None:
    """Have one worker of four fail at once whatever it is asked."""
    with attacked(folder, verdict, 4, w0="refuse = 1.0"):
        time.sleep(12.0)
    # A request that nobody else has begun may fail before it is known that the worker does.
    first = [each for each in verdict.lost if "engine_refused" in each or "internal" in each]
    verdict.said = f"{len(first)} of {len(first) + verdict.whole} failed"
    if len(first) <= 5:
        verdict.lost = [each for each in verdict.lost if each not in first]


def stopped_node(folder: Path, verdict: Verdict) -> None:
    """Stop a worker's process for six seconds, and let it go on: its host answers, it does not."""
    verdict.gap_s_max = STOPPED_GAP_S_MAX  # nobody can know at once that a process has stopped
    with attacked(folder, verdict, 3) as target:
        target.nodes["w0"].signal(signal.SIGSTOP)
        time.sleep(6.0)
        target.nodes["w0"].signal(signal.SIGCONT)
        time.sleep(4.0)
