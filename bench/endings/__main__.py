"""Run each scene whose name holds the given words, print a table, and return 1 if a promise was broken."""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from math import inf
from pathlib import Path

from bench import endings
from bench.endings import node_ends, process_deaths
from bench.endings.streams import Times, references
from bench.rig.node import node, short_folder

PROMISED_S = {"gone": 2.0, "exit at once": 2.0, "served": 3.0, "served by the successor": 4.0}  # of a quiet machine
DEATHS_A_NODE = 4  # in a row, before its supervision tree gives up


def tries_on_nodes(name: str, times: int, folder: Path) -> Iterator[Times]:
    """Try one scene of a living node so often, on a new node after `DEATHS_A_NODE` deaths."""
    scene = process_deaths.SCENES[name]
    deaths = 2 if "then" in name or "successor" in name else 1
    done = 0
    while done < times:
        with node(folder) as target:
            texts = references(target)
            for _ in range(min(times - done, DEATHS_A_NODE // deaths)):
                yield scene(target, texts)
                done += 1
            target.signal(signal.SIGTERM)
            node_ends.exited(target, 0, time.perf_counter(), within_s=node_ends.WITHIN_S)


def tries(name: str, times: int, folder: Path) -> Iterator[Times]:
    """Try one scene so often."""
    if name in process_deaths.SCENES:
        yield from tries_on_nodes(name, times, folder)
    else:
        for _ in range(times):
            yield node_ends.SCENES[name](folder)


def main() -> int:
    """Try each scene whose name holds the given words, print a table, return 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=endings.__doc__)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--only", default="", help="part of a scene's name")
    arguments = parser.parse_args()
    kept = True
    print(f"{'what happens':<48}{'what is timed':<28}{'tries':>6}{'p50 s':>8}{'max s':>8}")
    for name in (*process_deaths.SCENES, *node_ends.SCENES):
        if arguments.only in name:
            kept = measured(name, arguments.times) and kept
    return 0 if kept else 1


def measured(name: str, times: int) -> bool:
    """Try one scene, print its rows, and return whether every promise was kept."""
    taken: dict[str, list[float]] = {}
    broken = ""
    with short_folder() as folder:
        try:
            for result in tries(name, times, folder):
                for timed, seconds in result.items():
                    taken.setdefault(timed, []).append(seconds)
        except AssertionError as error:
            broken = str(error)
    for timed, times_s in taken.items():
        row = f"{len(times_s):>6}{statistics.median(times_s):>8.3f}{max(times_s):>8.3f}"
        print(f"{name:<48}{timed:<28}{row}", flush=True)
        if max(times_s) > PROMISED_S.get(timed, inf):
            broken = broken or f"{timed} after {max(times_s):.2f} s, where {PROMISED_S[timed]:g} s are promised"
    if broken:
        print(f"{name:<48}BROKEN: {broken}", flush=True)
    return not broken


if __name__ == "__main__":
    sys.exit(main())
