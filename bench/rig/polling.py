"""The load of both engines of a pair, read from `/metrics` as often as its nodes answer.

One worker is scraped over a kept connection; for each scrape it asks the other's engine anew over their link. The front
is scraped only where its counts are needed, since on few cores that takes CPU time from the abort that is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.client import HTTPConnection
from math import inf

from bench.rig.cluster import FRONT, Cluster, engine_load
from bench.rig.node import metric, wait_until

PREFILL, DECODE = "prefill", "decode"
FRONT_STATES = ("running", "waiting")
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
    running: float = inf  # requests of the front, if it was scraped
    waiting: float = inf

    @property
    def idle(self) -> bool:
        """Whether neither engine holds a request."""
        return not any(self.prefill.values()) and not any(self.decode.values())

    @property
    def places(self) -> int:
        """The number of requests in the engines, running or waiting."""
        return int(sum(load[gauge] for load in (self.prefill, self.decode) for gauge in ("running", "waiting")))

    @property
    def kv_tokens(self) -> int:
        """The number of KV tokens that the engines hold."""
        return int(self.prefill["kv_tokens_used"] + self.decode["kv_tokens_used"])


@dataclass
class LoadPoller:
    """Scrapes the nodes, `pause_s` apart, since a scrape takes CPU time from the abort that is measured."""

    target: Cluster
    pause_s: float
    periods: list[float] = field(default_factory=list)
    _connections: dict[str, HTTPConnection] = field(default_factory=dict)

    def read(self, *, front: bool = True) -> PairLoad:
        """Return the load of both engines and of the front, if asked for; raises `RequestNotReleased`.

        A scrape lacks an engine that did not answer in time, as on a busy machine; then it is repeated.
        """
        start = time.perf_counter()
        names = (PREFILL, FRONT) if front else (PREFILL,)
        while True:
            asked_at = time.perf_counter()
            for name in names:
                self._send(name)
            texts = {name: self._connections[name].getresponse().read().decode() for name in names}
            answered_at = time.perf_counter()
            self.periods.append(answered_at - asked_at + self.pause_s)
            prefill, decode = (engine_load(texts[PREFILL], name) for name in (PREFILL, DECODE))
            if prefill is not None and decode is not None:
                waits = [metric(texts[FRONT], f"espalier_requests_{state}") for state in FRONT_STATES] if front else []
                return PairLoad(prefill, decode, answered_at, *waits)
            if answered_at - start > GIVE_UP_S:
                raise RequestNotReleased(f"for {GIVE_UP_S:g} s an engine did not report its load")

    def wait(self, holds: Callable[[PairLoad], bool], *, front: bool = False) -> bool:
        """Wait until `holds` is true of the load, up to `REACHED_S`; return whether it was."""
        return wait_until(lambda: holds(self.read(front=front)), REACHED_S, self.pause_s) is not None

    def until(
        self, free: Callable[[PairLoad], bool], quiet: Callable[[PairLoad], bool], since: float, *, front: bool = False
    ) -> float:
        """Return how long after `since` the counts were `free` for good, in seconds; raises `RequestNotReleased`.

        An engine that has not yet received a request counts nothing either. So the engines must be free until the front
        has been `quiet` for `SETTLE_S`; the front is scraped once the engines are free, or always with `front`.
        """
        free_at, quiet_since = None, None
        while True:
            counts = self.read(front=front or free_at is not None)
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

    def _send(self, name: str) -> None:
        if name not in self._connections:
            self._connections[name] = HTTPConnection("127.0.0.1", self.target.nodes[name].port, timeout=GIVE_UP_S)
        self._connections[name].request("GET", "/metrics")
