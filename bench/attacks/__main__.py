"""Run each attack beside an honest client, print its figures, and return 1 if they were not within the bounds."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from bench.attacks import cluster_attacks, connection_attacks, engine_attacks, node_attacks
from bench.attacks.scenario import Verdict
from bench.rig.node import short_folder

Attack = Callable[[Path, Verdict], None]

ATTACKS: dict[str, Attack] = {
    "big-answers": node_attacks.big_answers,
    "unread-logs": node_attacks.unread_logs,
    "slow-readers": connection_attacks.slow_readers,
    "descriptors": connection_attacks.descriptors,
    "crashing-neighbours": node_attacks.crashing_neighbours,
    "huge-prompts": node_attacks.huge_prompts,
    "greedy-key": node_attacks.greedy_key,
    "long-prompts": node_attacks.long_prompts,
    "slow-heads": connection_attacks.slow_heads,
    "small-pieces": connection_attacks.small_pieces,
    "twins": cluster_attacks.twins,
    "five-drains": cluster_attacks.five_drains,
    "black-hole": cluster_attacks.black_hole,
    "stopped-node": cluster_attacks.stopped_node,
}
ON_ENGINES: dict[str, Attack] = {
    "stopped-scheduler": engine_attacks.stopped_scheduler,
    "full-disk": engine_attacks.full_disk,
}
HEAD = f"{'attack':20s} held  {'own gap':>8s} {'worst':>8s} {'first':>8s} {'whole':>6s}  lost  result"


def run_attack(attack: Attack) -> Verdict:
    """Run one attack and return its verdict; an attack that raises an error counts as not held."""
    verdict = Verdict()
    try:
        with short_folder() as folder:
            attack(folder, verdict)
    except Exception as error:  # noqa: BLE001  # the other attacks still run
        traceback.print_exc()
        verdict.wrong.append(repr(error)[:200])
    return verdict


def row(name: str, verdict: Verdict) -> str:
    """Return one line of the table; times in milliseconds."""
    times = (verdict.own_gap_ms, verdict.worst_gap_ms, verdict.worst_first_ms)
    numbers = f"{times[0]:8.0f} {times[1]:8.0f} {times[2]:8.0f} {verdict.whole:6d} {len(verdict.lost):5d}"
    held = "yes" if verdict.held else "NO"
    return f"{name:20s} {held:5s} {numbers}  {'; '.join(filter(None, [verdict.result, *verdict.wrong]))}"


def main() -> int:
    """Run every attack, or those that are named, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=[*ATTACKS, *ON_ENGINES])
    parser.add_argument("--engines", choices=("simulated", "sglang"), default="simulated")
    arguments = parser.parse_args()
    held = True
    print(HEAD)
    every = {**ATTACKS, **ON_ENGINES}
    for name in arguments.only or (ATTACKS if arguments.engines == "simulated" else ON_ENGINES):
        verdict = run_attack(every[name])
        held = held and verdict.held
        print(row(name, verdict), flush=True)
        for reason in verdict.lost[:3]:
            print(f"    lost: {reason}", flush=True)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
