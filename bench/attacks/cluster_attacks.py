"""Faults of a cluster: a second node of the same name, drains, a stopped node, a node that fails every request."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.attacks.scenario import Verdict, beside_honest_client
from bench.rig.cluster import Cluster, Plan, cluster, simulated
from bench.rig.node import free_port, start_process
from bench.rig.processes import MARK

COSTS = {"fixed_s": 0.05}
STOPPED_GAP_S_MAX = 3.5  # silent_s, and the time to continue on another worker


@contextmanager
def attacked_cluster(
    folder: Path, verdict: Verdict, workers: int, tokens: int = 60, **faults: str
) -> Iterator[Cluster]:
    """Run a cluster with the honest client beside it while the body attacks.

    Each stream of the client has so many `tokens`; `faults` are lines of the engine's table `faults`, by worker.
    """
    engines = {f"w{number}": simulated(f"w{number}", slots=16, costs=COSTS) for number in range(workers)}
    for name, lines in faults.items():
        engines[name] += f"\n[engine.tiny-{name}.simulated.faults]\n{lines}\n"
    plan = Plan(engines, drain_s=2.0, front_drain_s=20.0)  # without keys, which the metrics would need
    with (
        cluster(folder, plan) as target,
        beside_honest_client(folder, target.front.port, verdict, key="", tokens=tokens),
    ):
        yield target


def twins(folder: Path, verdict: Verdict) -> None:
    """Start a second process with the name of a living node."""
    with attacked_cluster(folder, verdict, 2) as target:
        twin_folder = target.folder / "twin"
        (twin_folder / "t").mkdir(parents=True)
        text = target.file("w0").replace(f"127.0.0.1:{target.link_ports['w0']}", f"127.0.0.1:{free_port()}")
        text = text.replace(f"port = {target.gateway_ports['w0']}", f"port = {free_port()}")
        (twin_folder / "cluster.toml").write_text(text)
        with (twin_folder / "output").open("wb") as output:
            arguments = ["--node", "w0", str(twin_folder / "cluster.toml")]
            twin = start_process(arguments, output, {"TMPDIR": str(twin_folder / "t"), MARK: "twin"})
        try:
            time.sleep(15.0)
        finally:
            twin.kill()
            twin.wait()
        logs = (twin_folder / "output").read_text() + target.nodes["w0"].output() + target.front.output()
        verdict.conclude("a log has the reason" if "two processes call themselves" in logs else "no log has the reason")


def five_drains(folder: Path, verdict: Verdict) -> None:
    """Drain five of six workers one after the other, and start each again."""
    with attacked_cluster(folder, verdict, 6, tokens=400) as target:
        for name in target.workers[:5]:
            target.nodes[name].signal(signal.SIGTERM)
            target.nodes[name].wait_exit(20.0)
            target.start(name)
        verdict.conclude("five drains")


def black_hole(folder: Path, verdict: Verdict) -> None:
    """Let one worker of four fail every request at once."""
    with attacked_cluster(folder, verdict, 4, w0="refuse = 1.0"):
        time.sleep(12.0)
    # The first requests may fail before the worker is ejected.
    failed = [reason for reason in verdict.lost if "engine_refused" in reason or "internal" in reason]
    verdict.conclude(f"{len(failed)} of {len(failed) + verdict.whole} failed")
    if len(failed) <= 5:
        verdict.lost = [reason for reason in verdict.lost if reason not in failed]


def stopped_node(folder: Path, verdict: Verdict) -> None:
    """Stop a worker's process for six seconds: its kernel still acknowledges, it does not answer."""
    verdict.gap_s_max = STOPPED_GAP_S_MAX  # a stopped process is noticed by its silence alone
    with attacked_cluster(folder, verdict, 3) as target:
        target.nodes["w0"].signal(signal.SIGSTOP)
        time.sleep(6.0)
        target.nodes["w0"].signal(signal.SIGCONT)
        time.sleep(4.0)
