"""The load of both engines of a pair, read from `/metrics` as often as its nodes answer.

One worker is asked, which asks the other's engine anew over their link, over a connection that is kept. The front is
asked only where its count is the question: on a machine of few cores its answer would take from the abort.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.client import HTTPConnection
from math import inf

from bench.rig.cluster import FRONT, LOAD_GAUGES, Cluster, cluster_engine_name
from bench.rig.node import metric, wait_until

PREFILL, DECODE = "prefill", "decode"
FRONTS = ("running", "waiting")
GIVE_UP_S = 15.0
SETTLE_S = 0.1
REACHED_S = 5.0


class RequestNotReleased(Exception):
    """A request was not released long after its client had left."""


@dataclass(frozen=True)
class PairLoad:
    """The load of both engines at one moment."""

    prefill: dict[str, float]
    decode: dict[str, float]
    at: float
    running: float = inf  # of the front, if it was asked
    waiting: float = inf

    @property
    def idle(self) -> bool:
        """Whether neither engine holds anything."""
        return not any(self.prefill.values()) and not any(self.decode.values())

    @property
    def places(self) -> int:
        """How many requests are in the engines, running or waiting."""
        return int(sum(load[each] for load in (self.prefill, self.decode) for each in LOAD_GAUGES[:2]))

    @property
    def kv_tokens(self) -> int:
        """How much KV memory they hold."""
        return int(self.prefill[LOAD_GAUGES[2]] + self.decode[LOAD_GAUGES[2]])


@dataclass
class LoadPoller:
    """Reads what the nodes count; it rests `pause_s` between two looks, as a look takes CPU time from the abort."""

    target: Cluster
    pause_s: float
    periods: list[float] = field(default_factory=list)
    _connections: dict[str, HTTPConnection] = field(default_factory=dict)

    def look(self, *, front: bool = True) -> PairLoad:
        """Ask for both engines, and the front as well if that is wanted; raises `RequestNotReleased` if one is silent.

        A node leaves out an engine that does not answer it in time, as one may on a busy machine: it is asked again.
        """
        start = time.perf_counter()
        names = (PREFILL, FRONT) if front else (PREFILL,)
        while True:
            asked_at = time.perf_counter()
            for name in names:
                self._ask(name)
            texts = {name: self._connections[name].getresponse().read().decode() for name in names}
            at = time.perf_counter()
            self.periods.append(at - asked_at + self.pause_s)
            prefill, decode = (_engine(texts[PREFILL], cluster_engine_name(name)) for name in (PREFILL, DECODE))
            if prefill is not None and decode is not None:
                waits = [metric(texts[FRONT], f"espalier_requests_{each}") for each in FRONTS] if front else []
                return PairLoad(prefill, decode, at, *waits)
            if at - start > GIVE_UP_S:
                raise RequestNotReleased(f"for {GIVE_UP_S:g} s an engine did not say what it holds")

    def wait(self, holds: Callable[[PairLoad], bool], *, front: bool = False) -> bool:
        """Wait until the counts are so; return whether they were."""
        return wait_until(lambda: holds(self.look(front=front)), REACHED_S, self.pause_s) is not None

    def until(
        self, free: Callable[[PairLoad], bool], quiet: Callable[[PairLoad], bool], since: float, *, front: bool = False
    ) -> float:
        """Return how long after `since` the counts were `free` for good, in seconds; raises `RequestNotReleased`.

        An engine that has not yet heard of a request counts nothing either: it is for good when the front has been
        `quiet` as well, for `SETTLE_S`. It is asked for that only when the engines are free, or if `free` wants it.
        """
        free_at, quiet_since = None, None
        while True:
            counts = self.look(front=front or free_at is not None)
            free_at = (free_at or counts.at) if free(counts) else None
            quiet_since = (quiet_since or counts.at) if free_at is not None and quiet(counts) else None
            if free_at is not None and quiet_since is not None and counts.at - quiet_since > SETTLE_S:
                return free_at - since
            if counts.at - since > GIVE_UP_S:
                raise RequestNotReleased(
                    f"{GIVE_UP_S:g} s after its client had left, a request was still there: {counts}"
                )
            time.sleep(self.pause_s)

    def until_idle(self, since: float) -> float:
        """Return how long after `since` both engines were idle for good, and the front as well."""
        return self.until(lambda now: now.idle, lambda now: now.running == 0, since)

    def close(self) -> None:
        """Close its connections."""
        for each in self._connections.values():
            each.close()

    def _ask(self, name: str) -> None:
        if name not in self._connections:
            self._connections[name] = HTTPConnection("127.0.0.1", self.target.nodes[name].port, timeout=GIVE_UP_S)
        self._connections[name].request("GET", "/metrics")


def _engine(text: str, name: str) -> dict[str, float] | None:
    if f'espalier_engine_{LOAD_GAUGES[0]}{{engine="{name}"}}' not in text:
        return None
    return {each: metric(text, f"espalier_engine_{each}", engine=name) for each in LOAD_GAUGES}
