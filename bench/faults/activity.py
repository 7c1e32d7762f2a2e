"""Whether a server's engine computes, from outside: by the CPU time of the processes that have it.

The rate at which they use CPU time is compared with a threshold between idle and busy, both measured on this server: an
idle engine sleeps, one that computes for a single client uses many times as much. Besides, the requests that the server
itself counts as running or waiting are read where it has such counts.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path

from attrs import frozen

from bench.cost.groups import APART, groups
from bench.peers.running import Running
from bench.rig.clients import Chat, chat_body
from bench.rig.processes import ProcessEntry

WINDOW_S = 0.1
QUIET_S = 1.0  # without a busy window: the engine has stopped
IDLE_S, BUSY_S = 2.0, 1.0  # to calibrate for
RATIO_MIN = 3.0  # between busy and idle
TOKENS = 3000  # of the answer by which busy is measured, which is left

ENGINES = (APART, "mocker", "node worker-", "node")
"""The groups of processes that compute tokens, or how their names begin; those of the first that is found count."""

COUNTS = re.compile(
    r"^((?:espalier_(?:requests|engine)_(?:running|waiting)|dynamo_frontend_(?:inflight|queued)_requests|"
    r"sglang:num_(?:running|queue)_reqs)(?:\{.*\})?) (\S+)$",
    re.MULTILINE,
)


class Unobservable(Exception):
    """An engine that computes cannot be told from an idle one."""


class EngineEnded(Exception):
    """A process with the engine is gone: it uses no CPU time, and has not become idle."""


def engine_processes(entries: Sequence[ProcessEntry]) -> list[int]:
    """Return the processes of a server that have its engines."""
    named = groups(entries)
    for group in ENGINES:
        if found := [pid for pid, name in named.items() if name.startswith(group)]:
            return found
    return []


def ran_s(pid: int) -> float:
    """Return the time of a process's living threads on a core, exact to the microsecond."""
    try:
        threads = list((Path("/proc") / str(pid) / "task").iterdir())
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9
    except OSError:
        return 0.0


@frozen
class Window:
    """A short time, and how much of a core the engine used in it."""

    end_s: float  # since the first window's start
    share: float


def windows(processes: Sequence[int], window_s: float = WINDOW_S) -> Iterator[Window]:
    """Yield one window after another."""
    begin = before = time.perf_counter()
    used = sum(map(ran_s, processes))
    while True:
        time.sleep(window_s)
        now, total = time.perf_counter(), sum(map(ran_s, processes))
        yield Window(now - begin, max(0.0, total - used) / (now - before))
        before, used = now, total


@frozen
class Afterwards:
    """The computing of an engine after a client has left."""

    computed_s: float  # until the last busy window's end
    cpu_s: float  # of the engine until then
    limited: bool  # it still computed at the limit


def computing(observed: Iterator[Window], threshold: float, limit_s: float, quiet_s: float = QUIET_S) -> Afterwards:
    """Return for how long an engine computed on, until it was quiet or the limit was reached.

    A single window over the threshold counts only at the beginning: an idle engine has one now and then.
    """
    computed_s = cpu_s = spent_s = begin_s = 0.0
    busy_before = True
    for window in observed:
        spent_s += window.share * (window.end_s - begin_s)
        begin_s = window.end_s
        busy = window.share > threshold
        if busy and busy_before:
            computed_s, cpu_s = window.end_s, spent_s
        busy_before = busy
        if window.end_s >= limit_s:
            return Afterwards(computed_s, cpu_s, limited=window.end_s - computed_s < quiet_s)
        if not busy and window.end_s - computed_s >= quiet_s:
            break
    return Afterwards(computed_s, cpu_s, limited=False)


@frozen
class Activity:
    """The engine of a running server: its processes, and when it counts as busy."""

    running: Running
    processes: list[ProcessEntry]
    idle: float  # of a core
    busy: float

    def computing(self, limit_s: float) -> Afterwards:
        """Return for how long the engine computes from now on; raises `EngineEnded`."""
        threshold = math.sqrt(self.idle * self.busy)
        after = computing(windows([entry.pid for entry in self.processes]), threshold, limit_s)
        if ended := [entry.command for entry in self.processes if not entry.lives]:
            raise EngineEnded(f"{len(ended)} of {len(self.processes)} processes of the engine ended: {ended[0][:80]}")
        return after

    def counts(self) -> dict[str, float]:
        """Return the requests that the server still counts, by the names of its metrics; empty without any."""
        status, body = self.running.ask("GET", "/metrics")
        found = COUNTS.findall(body.decode()) if status == 200 else []
        return {name: float(value) for name, value in found if float(value)}


def calibrate(running: Running) -> Activity:
    """Measure an idle engine, and one that answers one client; raises `Unobservable`."""

    def shares(for_s: float) -> list[float]:
        return [window.share for window in takewhile(lambda each: each.end_s < for_s, windows(processes))]

    entries = running.processes()
    processes = engine_processes(entries)
    idle = statistics.quantiles(shares(IDLE_S), n=4)[-1]  # what is done once a second is in few of them
    chat = Chat(running.setup.port, chat_body("Tell me about the oak", TOKENS))
    next(chat.events(), None)
    busy = statistics.median(shares(BUSY_S))
    chat.leave()
    chat.close()
    if not processes or busy < RATIO_MIN * max(idle, 1e-6):
        raise Unobservable(f"idle it used {idle:.4f} of a core, answering a request {busy:.4f}")
    return Activity(running, [entry for entry in entries if entry.pid in processes], max(idle, 1e-4), busy)
