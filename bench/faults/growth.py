"""Does anything of a server's processes grow with the number of requests? Samples at rest, and a line through them.

`soak` sends requests of every kind to a real engine, and a third of its clients disconnect early. Every complete answer
must equal the first answer to its prompt, and nothing may be held at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from random import Random
from statistics import linear_regression

from bench.faults.polling import resources
from bench.faults.scenario import Run, check
from bench.rig.checked_clients import (
    CHECKED_PROMPTS,
    CheckedRequest,
    GatewayInterruptions,
    References,
    Tally,
    references,
    send,
    verdict,
)
from bench.rig.cluster import LOAD_GAUGES
from bench.rig.node import Node, node, wait_until
from bench.rig.processes import memory_bytes

COLUMNS = ("process", "what", "at first", "after warm-up", "at the end", "by 1,000", "bound")
BOUNDS = {"MB": 6.0, "descriptors": 1.0, "memory files": 1.0, "threads": 1.0, "tasks": 1.0, "files": 0.5}
"""Of the growth by 1,000 requests, of each process."""

WARM_UP = 0.25  # of all requests, in which allocators and caches fill
EVERY = 100
KINDS = ("stream", "whole", "response", "cancel")
LEAVE_SHARE = 0.39  # of the requests; about a fifth of them are answered before, so that 30 % really disconnect
LEAVES_WITHIN_S = 1.2  # about as long as an answer takes among fifteen others
LEFT = {"cancel": {"cancelled"}}  # the errors of an answer that was left, by its kind
ROLES = ("node", "host", "scheduler")


Sample = Mapping[tuple[str, str], float]  # by process and measured quantity


def sample(pids: Mapping[str, int]) -> dict[tuple[str, str], float]:
    """Measure processes by their names; one that ends meanwhile is left out."""
    values: dict[tuple[str, str], float] = {}
    for name, pid in pids.items():
        with suppress(OSError):
            values[name, "MB"] = memory_bytes(pid, "Rss") / 1e6
            values.update({(name, what): count for what, count in resources(pid).items()})
    return values


def grow(run: Run, count: int, send_all: Callable[[int, int], object], measure: Callable[[], Sample]) -> None:
    """Send requests by their numbers, with a sample after every `EVERY`, and add a row for each quantity."""
    samples = [(0, measure())]
    for begin in range(0, count, EVERY):
        end = min(begin + EVERY, count)
        send_all(begin, end)
        samples.append((end, measure()))
    judge(run, samples, WARM_UP * count)


def judge(run: Run, samples: Sequence[tuple[int, Sample]], warm_from: float) -> None:
    """Add a row for each quantity, and say which grows too much after the warm-up."""
    warm = [(done, values) for done, values in samples if done >= warm_from]
    if len(warm) < 2:
        raise ValueError(f"a slope needs two samples after the warm-up: at least {2 * EVERY} requests")
    for name, what in samples[0][1]:
        first, begin, end = (each[1].get((name, what), 0.0) for each in (samples[0], warm[0], warm[-1]))
        points = [(done, values.get((name, what), 0.0)) for done, values in warm]
        grows = 1000 * linear_regression(*zip(*points, strict=True)).slope
        run.row(name, what, first, begin, end, grows, BOUNDS[what])
        run.check(grows <= BOUNDS[what], f"{what} of {name} grows by {grows:.1f} a thousand requests")


# A soak on a real engine -----------------------------------------------------------------


def send_one(port: int, right: References, tally: Tally, seed: int) -> None:
    """Send the request of a seed, and count its answer."""
    chance = Random(seed)
    request = CheckedRequest(chance.choice(KINDS), chance.choice(CHECKED_PROMPTS), None)
    leaves = chance.random() < LEAVE_SHARE
    leave_after_s = chance.random() ** 2 * LEAVES_WITHIN_S if leaves else None  # early moments more often
    begin = time.perf_counter()
    received = send(port, request, leave_after_s)
    category, why = verdict(request, received, right[request.prompt, None], left=leaves, gateway=GatewayInterruptions())
    if category != "whole" and (
        category != "left" or received.error not in LEFT.get(request.kind, {None, "connection"})
    ):
        why = why or f"it ended in {received.error}"
    tally.note(request, f"{request.kind} {category}", why, time.perf_counter() - begin)


def measure(target: Node) -> Sample:
    """Measure every process of an idle node."""
    idle = wait_until(lambda: target.metric("espalier_requests_running") == 0, 20.0, 0.02)
    check(idle is not None, "a request still runs 20 s after its client has ended")
    time.sleep(0.3)
    living = target.observe()
    values = sample({role: living[role].pid for role in ROLES})
    files = sum(1 for _ in target.tmp.rglob("*")) + len(target.shared_memory)
    return values | {("node", "tasks"): target.metric("espalier_node_tasks"), ("temporary", "files"): files}


def soak(run: Run) -> None:
    """Send all requests, and compare the samples."""
    options, tally = run.options, Tally()
    with node(run.folder) as target, ThreadPoolExecutor(options.concurrency) as pool:
        right = references(target.port)

        def send_all(begin: int, end: int) -> None:
            seeds = (options.seed * 1_000_000 + number for number in range(begin, end))
            list(pool.map(partial(send_one, target.port, right, tally), seeds))

        grow(run, options.requests, send_all, partial(measure, target))
        held = {name: target.metric(f"espalier_engine_{name}") for name in LOAD_GAUGES}
        run.check(not any(held.values()), f"at the end the engine holds {held}")
        run.notes.append(f"restarts of children: {target.metric('espalier_child_restarts_total'):g}")
    run.notes += tally.lines()
    run.wrong += tally.bad
