"""Attacks that take a real engine: a scheduler that is stopped, a disk that is full under its log."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from bench.attacks.node_attacks import attacked, restarts
from bench.attacks.scenario import Verdict
from bench.rig.node import SGLANG, Node, cpu_s, wait_until

NOTICED_WITHIN_S = 40.0
OTHER = """\
[model.other]
path = "{path}"
[engine.other-0]
model = "other"
device = "cpu"
kv_tokens_max = 16384
"""


def stopped_scheduler(folder: Path, verdict: Verdict) -> None:
    """Stop the scheduler of an idle engine of another model, which nothing but its own silence tells of."""
    other = OTHER.format(path=Path("examples/tiny").resolve())
    with attacked(folder, verdict, slots=16, engine=SGLANG + other) as target:
        idle = idlest(schedulers(target))
        before = restarts(target)
        os.kill(idle, signal.SIGSTOP)
        noticed_s = wait_until(lambda: restarts(target) > before, NOTICED_WITHIN_S, every_s=0.1)
        with suppress(ProcessLookupError):
            os.kill(idle, signal.SIGCONT)
        verdict.said = "nobody noticed" if noticed_s is None else f"noticed after {noticed_s:.1f} s"
        if noticed_s is None:
            verdict.wrong.append(verdict.said)


def schedulers(target: Node) -> list[int]:
    """Return the processes of the node's schedulers that live."""
    target.look()
    return [pid for pid, role in target.roles.items() if role == "scheduler" and target.known[pid].lives]


def idlest(processes: Sequence[int]) -> int:
    """Return the process that computes least within a second."""
    before = {pid: cpu_s(pid) for pid in processes}
    time.sleep(1.0)
    return min(processes, key=lambda pid: cpu_s(pid) - before[pid])


def full_disk(folder: Path, verdict: Verdict) -> None:
    """Give the engines' logs a disk of 8 kB; it takes the right to mount one."""
    mounted = 'mount -t tmpfs -o size=8k none "$0" && exec "$@"'
    prefix = ("unshare", "--mount", "sh", "-c", mounted, str(folder / "logs"))
    with attacked(folder, verdict, slots=16, engine=SGLANG, prefix=prefix) as target:
        for _ in range(3):  # each life of the engine says more than there is room for
            target.kill("scheduler")
            time.sleep(1.0)
            target.wait_ready()
        told = [line for line in target.output().splitlines() if "No space left" in line]
    verdict.lost = [each for each in verdict.lost if "engine_lost" not in each and "503" not in each]  # it was killed
    verdict.said = f"the log says so in {len(told)} lines"
    if not told:
        verdict.wrong.append(verdict.said)
