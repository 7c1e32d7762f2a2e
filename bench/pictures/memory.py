"""Many different pictures: does anything grow?"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from bench.pictures.senders import Tally, send_all
from bench.pictures.setup import running
from bench.rig.cluster import Cluster
from bench.rig.media_load import TEMPLATE, memory_files
from bench.rig.node import wait_until
from bench.rig.pictures import data_url, jpeg
from bench.rig.processes import SHARED_MEMORY, memory_bytes, open_files, shared_memory_names, threads
from bench.rig.trend import slope

PICTURES, CLIENTS = 2000, 4
EVERY = 100
WARM_UP = 0.25  # of all pictures
SIZE = 640, 480
CACHE_BYTES_MAX = 16 * 1024 * 1024  # full long before the warm-up ends
REST_S = 1.5  # in which a node collects its garbage, as no request runs
BOUNDS = {"MB": 6.0, "descriptors": 1.0, "memory files": 1.0, "threads": 1.0, "shared memory": 0.5}
"""Of growth by 1,000 pictures, of each process."""

Sample = dict[tuple[str, str], float]  # by process and measured quantity


def processes(target: Cluster) -> dict[str, int]:
    """Return the processes of all nodes by names."""
    found: dict[str, int] = {}
    for name, node in target.nodes.items():
        for entry in node.living():
            role = name if entry.pid == node.pid else f"{name} {'decoders' if TEMPLATE in entry.command else 'other'}"
            found.setdefault(role, entry.pid)
    return found


def sample(target: Cluster) -> Sample:
    """Measure every process, at rest."""
    assert not target.wait_idle(20.0)
    time.sleep(REST_S)
    values: Sample = {}
    for role, pid in processes(target).items():
        with suppress(OSError):
            values[role, "MB"] = memory_bytes(pid, "Rss") / 1e6
            values[role, "descriptors"] = open_files(pid)
            values[role, "memory files"] = memory_files(pid)
            values[role, "threads"] = threads(pid)
            values[role, "shared memory"] = len(shared_memory_names(pid))
    values["machine", "shared memory"] = sum(1 for _ in SHARED_MEMORY.iterdir())
    return values


def pictures(begin: int, end: int) -> Iterator[tuple[str, str]]:
    """Yield the names and URLs of different pictures."""
    for number in range(begin, end):
        yield str(number), data_url(jpeg(*SIZE, number))


def table(samples: list[tuple[int, Sample]], warm_from: float) -> list[str]:
    """Print how each measured quantity grows after the warm-up, and return what grows too much."""
    wrong = []
    head = f"{'process':<18}{'what':<16}{'at first':>10}{'after warm-up':>15}"
    print(f"{head}{'at the end':>12}{'by 1,000':>10}{'bound':>8}")
    warm = [(done, values) for done, values in samples if done >= warm_from]
    for role, what in samples[0][1]:
        first, begin, end = (each[1].get((role, what), 0.0) for each in (samples[0], warm[0], warm[-1]))
        grows = slope([(done, values.get((role, what), 0.0)) for done, values in warm])
        bad = grows > BOUNDS[what] and role != "machine"
        verdict = "  GROWS" if bad else ""
        row = f"{role:<18}{what:<16}{first:>10.1f}{begin:>15.1f}{end:>12.1f}{grows:>10.2f}{BOUNDS[what]:>8.1f}"
        if first or begin or end:
            print(f"{row}{verdict}")
        if bad:
            wrong.append(f"{what} of {role} grows by {grows:.1f} a thousand pictures")
    return wrong


def measure(folder: Path, count: int) -> list[str]:
    """Print how much grows, and return what is wrong."""
    tally, samples = Tally(), list[tuple[int, Sample]]()
    print(f"{count} different pictures of {SIZE[0]} x {SIZE[1]}, {CLIENTS} at a time")
    with running(folder / "memory", encoder={"cache_bytes_max": CACHE_BYTES_MAX}, step_s=0.002) as target:
        began_at = time.perf_counter()
        send_all(target.front.port, pictures(count, count + 2 * CLIENTS), CLIENTS, Tally())
        samples.append((0, sample(target)))
        for begin in range(0, count, EVERY):
            end = min(begin + EVERY, count)
            send_all(target.front.port, pictures(begin, end), CLIENTS, tally)
            samples.append((end, sample(target)))
            megabytes = {role: round(value) for (role, what), value in samples[-1][1].items() if what == "MB"}
            print(f"{end:>6} {megabytes}", file=sys.stderr, flush=True)
        took_s = time.perf_counter() - began_at
        wrong = table(samples, WARM_UP * count)
        held = wait_until(lambda: not target.held(), 10.0)
        wrong += [] if held is not None else target.held()
        wrong += target.stop(20.0)
    print(f"{dict(tally.outcomes)} in {took_s:.0f} s")
    if tally.failed:
        wrong.append(f"{tally.failed} pictures were not answered")
    return wrong
