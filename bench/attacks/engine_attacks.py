"""Faults that need a real engine: a scheduler that is stopped, a full disk under the engine's log."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from bench.attacks.node_attacks import restarts
from bench.attacks.scenario import Verdict, attacked_node
from bench.rig.node import SGLANG, Node, wait_until
from bench.rig.processes import cpu_s

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
    """Stop the scheduler of an idle engine of another model, which only its silence reveals."""
    other = OTHER.format(path=Path("examples/tiny").resolve())
    with attacked_node(folder, verdict, slots=16, engine=SGLANG + other) as target:
        idle = idlest(schedulers(target))
        before = restarts(target)
        os.kill(idle, signal.SIGSTOP)
        noticed_s = wait_until(lambda: restarts(target) > before, NOTICED_WITHIN_S, every_s=0.1)
        with suppress(ProcessLookupError):
            os.kill(idle, signal.SIGCONT)
        result = "not noticed" if noticed_s is None else f"noticed after {noticed_s:.1f} s"
        verdict.conclude(result, kept=noticed_s is not None)


def schedulers(target: Node) -> list[int]:
    """Return the pids of the node's living schedulers."""
    target.observe()
    return [pid for pid, role in target.roles.items() if role == "scheduler" and target.observed[pid].lives]


def idlest(processes: Sequence[int]) -> int:
    """Return the process that uses the least CPU time within a second."""
    before = {pid: cpu_s(pid) for pid in processes}
    time.sleep(1.0)
    return min(processes, key=lambda pid: cpu_s(pid) - before[pid])


def full_disk(folder: Path, verdict: Verdict) -> None:
    """Give the engines' logs a disk of 8 kB; this needs the right to mount one."""
    mounted = 'mount -t tmpfs -o size=8k none "$0" && exec "$@"'
    prefix = ("unshare", "--mount", "sh", "-c", mounted, str(folder / "logs"))
    with attacked_node(folder, verdict, slots=16, engine=SGLANG, prefix=prefix) as target:
        for _ in range(3):  # each start of the engine logs more than there is room for
            target.kill("scheduler")
            time.sleep(1.0)
            target.wait_ready()
        lines = [line for line in target.output().splitlines() if "No space left" in line]
    # Answers of the engine that was killed may be lost.
    verdict.lost = [reason for reason in verdict.lost if "engine_lost" not in reason and "503" not in reason]
    verdict.conclude(f"{len(lines)} lines of the log report it", kept=bool(lines))
