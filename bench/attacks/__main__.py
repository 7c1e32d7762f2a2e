"""Run each attack beside an honest client, print what it found, and return 1 if one did not hold."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from bench._node import place
from bench.attacks import on_a_cluster, on_a_node, on_engines
from bench.attacks.scene import Verdict

Attack = Callable[[Path, Verdict], None]

ATTACKS: dict[str, Attack] = {
    "big-answers": on_a_node.big_answers,
    "unread-logs": on_a_node.unread_logs,
    "slow-readers": on_a_node.slow_readers,
    "descriptors": on_a_node.descriptors,
    "crashing-neighbours": on_a_node.crashing_neighbours,
    "huge-prompts": on_a_node.huge_prompts,
    "greedy-key": on_a_node.greedy_key,
    "long-prompts": on_a_node.long_prompts,
    "slow-heads": on_a_node.slow_heads,
    "small-pieces": on_a_node.small_pieces,
    "twins": on_a_cluster.twins,
    "five-drains": on_a_cluster.five_drains,
    "black-hole": on_a_cluster.black_hole,
    "stopped-node": on_a_cluster.stopped_node,
}
ON_ENGINES: dict[str, Attack] = {
    "stopped-scheduler": on_engines.stopped_scheduler,
    "full-disk": on_engines.full_disk,
}
HEAD = f"{'attack':20s} held  {'own gap':>8s} {'worst':>8s} {'first':>8s} {'whole':>6s}  lost  what it came to"


def tried(attack: Attack) -> Verdict:
    """Run one attack; one that fails by itself proves nothing, and has not held."""
    verdict = Verdict()
    try:
        with place() as folder:
            attack(folder, verdict)
    except Exception as error:  # noqa: BLE001  # the others are still to be tried
        traceback.print_exc()
        verdict.wrong.append(repr(error)[:200])
    return verdict


def row(name: str, verdict: Verdict) -> str:
    """Return one line about an attack; times in milliseconds."""
    times = (verdict.own_gap_ms, verdict.worst_gap_ms, verdict.worst_first_ms)
    numbers = f"{times[0]:8.0f} {times[1]:8.0f} {times[2]:8.0f} {verdict.whole:6d} {len(verdict.lost):5d}"
    held = "yes" if verdict.held else "NO"
    return f"{name:20s} {held:5s} {numbers}  {'; '.join(filter(None, [verdict.said, *verdict.wrong]))}"


def main() -> int:
    """Try every attack, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=[*ATTACKS, *ON_ENGINES])
    parser.add_argument("--engines", choices=("simulated", "sglang"), default="simulated")
    arguments = parser.parse_args()
    held = True
    print(HEAD)
    every = {**ATTACKS, **ON_ENGINES}
    for name in arguments.only or (ATTACKS if arguments.engines == "simulated" else ON_ENGINES):
        verdict = tried(every[name])
        held = held and verdict.held
        print(row(name, verdict), flush=True)
        for each in verdict.lost[:3]:
            print(f"    lost: {each}", flush=True)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
