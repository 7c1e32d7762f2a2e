"""Everything that a cluster holds for its requests, read from `/metrics` and `/proc` as often as its nodes answer.

One number for each place where a request may leave something: slots and KV memory of engines, requests of the front,
tensors and streams on links, the budgets of the media actor and its decoders, the encoder's queue. A node's scrape has
the load of every engine of the cluster, each read anew; the queue of an encoder is at its own node.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from math import inf
from pathlib import Path

from bench.rig.node import Node, wait_until
from bench.rig.processes import open_files, process_table, shared_memory_names, threads

ENGINES = (
    *("espalier_requests_running", "espalier_requests_waiting"),
    *("espalier_engine_running", "espalier_engine_waiting", "espalier_engine_kv_tokens_used"),
)
WATCHED = (
    *ENGINES,
    *("espalier_media_bytes", "espalier_media_running", "espalier_media_waiting"),
    *("espalier_shared_memory_bytes", "espalier_shared_memory_waiting"),
    *("espalier_encoder_queue_items", "espalier_link_attached_bytes", "espalier_link_streams"),
    "espalier_engine_requests_assigned",
)
TEMPLATE = "actors.media.decoder"  # in the command of the process that forks them
SHARED = "memfd:"
SERVED = 'side="served"'  # streams, of which a scrape of the asking node opens some for a moment
GIVE_UP_S = 15.0
SETTLE_S = 0.15
REACHED_S = 15.0  # a busy machine is slow to reach a stage


class RequestNotReleased(Exception):
    """A request was not released long after its client had left."""


@dataclass(frozen=True)
class Held:
    """The numbers at one moment, by the node and the name of the series."""

    values: Mapping[str, float]
    at: float

    def total(self, node: str, *words: str, default: float | None = None) -> float:
        """Return the sum of a node's numbers whose names have all words; `AssertionError` if there are none."""
        names = [name for name in self.values if name.startswith(node) and all(word in name for word in words)]
        assert names or default is not None, f"{node} has no series with {words}"
        return sum(self.values[name] for name in names) if names else default or 0.0

    @property
    def idle(self) -> bool:
        """Whether nothing is held."""
        return not any(self.values.values())

    def within(self, other: Held) -> bool:
        """Whether nothing is held that was not held then."""
        return all(value <= other.values.get(name, 0.0) for name, value in self.values.items())

    def sentences(self) -> list[str]:
        """Return what is held."""
        return [f"{name} is {value:g}" for name, value in self.values.items() if value]


def series(text: str, watched: tuple[str, ...] = WATCHED) -> dict[str, float]:
    """Return the watched series of a scrape."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith(watched) and SERVED not in line:
            name, _, value = line.rpartition(" ")
            found[name.removeprefix("espalier_")] = float(value)
    return found


@dataclass
class Poller:
    """Scrapes nodes over kept connections, `pause_s` apart, since a scrape takes CPU time from what is measured.

    `names` are always scraped; `last` is scraped once the others hold nothing of the request. A scrape lacks an engine
    that did not answer in time, as on a busy machine; it is repeated until it has all series of `needs`.
    """

    nodes: Mapping[str, Node]
    names: Sequence[str]
    pause_s: float
    last: str = ""
    engines_only: bool = False  # of what is watched, beside the requests of gateways
    needs: Sequence[str] = ()
    outside: Callable[[], Mapping[str, float]] = dict  # what is held elsewhere: decoders, connections to a server
    periods: list[float] = field(default_factory=list)
    _connections: dict[str, HTTPConnection] = field(default_factory=dict)

    def read(self, *more: str) -> Held:
        """Return what the nodes hold, and these other ones; raises `RequestNotReleased` without an answer."""
        watched = ENGINES if self.engines_only else WATCHED
        began_at, names = time.perf_counter(), tuple(dict.fromkeys((*self.names, *more)))
        while True:
            asked_at = time.perf_counter()
            for name in names:
                if name not in self._connections:
                    self._connections[name] = HTTPConnection("127.0.0.1", self.nodes[name].port, timeout=GIVE_UP_S)
                self._connections[name].request("GET", "/metrics")
            texts = {name: self._connections[name].getresponse().read().decode() for name in names}
            values = {
                f"{name} {key}": value for name, text in texts.items() for key, value in series(text, watched).items()
            }
            values.update(self.outside())
            now = time.perf_counter()
            self.periods.append(now - asked_at + self.pause_s)
            if all(any(need in name for name in values) for need in self.needs):
                return Held(values, now)
            if now - began_at > GIVE_UP_S:
                raise RequestNotReleased(f"for {GIVE_UP_S:g} s an engine did not report its load")

    def wait(self, holds: Callable[[Held], bool], within_s: float = REACHED_S) -> bool:
        """Wait until `holds` is true; return whether it was."""
        return wait_until(lambda: holds(self.read()), within_s, self.pause_s) is not None

    def until(
        self, free: Callable[[Held], bool], since: float, quiet: Callable[[Held], bool] = lambda _: True
    ) -> float:
        """Return how long after `since` the load was `free` for good, in seconds; raises `RequestNotReleased`.

        A place that has not yet received a request counts nothing either. So it must be free until the front, which is
        the last node, has been `quiet` for `SETTLE_S`.
        """
        free_at = quiet_since = None
        while True:
            held = self.read() if free_at is None else self.read(*filter(None, [self.last]))
            free_at = (free_at or held.at) if free(held) else None
            quiet_since = (quiet_since or held.at) if free_at is not None and quiet(held) else None
            if free_at is not None and quiet_since is not None and held.at - quiet_since > SETTLE_S:
                return free_at - since
            if held.at - since > GIVE_UP_S:
                what = "; ".join(held.sentences())
                raise RequestNotReleased(f"{GIVE_UP_S:g} s after its client had left, something was still held: {what}")
            time.sleep(self.pause_s)

    def until_idle(self, since: float) -> float:
        """Return how long after `since` nothing was held for good: nothing at all, or nothing of the engines."""
        if not self.engines_only:
            return self.until(lambda held: held.idle, since)
        return self.until(self._engines_idle, since, self._front_quiet)

    def _engines_idle(self, held: Held) -> bool:
        return not held.total(self.names[0], "engine_")

    def _front_quiet(self, held: Held) -> bool:
        return held.total(self.last or self.names[0], "requests_running", default=inf) == 0

    def close(self) -> None:
        """Close its connections."""
        for each in self._connections.values():
            each.close()


def template_of(node: Node) -> int:
    """Return the process that forks the decoders of a node."""
    return next(entry.pid for entry in process_table() if entry.parent == node.pid and TEMPLATE in entry.command)


def children(pid: int) -> list[int]:
    """Return the children of a process, zombies included."""
    with suppress(OSError):
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def resources(pid: int) -> dict[str, int]:
    """Return the descriptors, files in memory without a name, threads and names under /dev/shm of a process."""
    return {
        "descriptors": open_files(pid),
        "memory files": memory_files(pid),
        "threads": threads(pid),
        "files": len(shared_memory_names(pid)),
    }


def remains(node: Node) -> Counter[str]:
    """Return what the processes of a node hold now."""
    total: Counter[str] = Counter()
    for entry in node.living():
        with suppress(OSError):  # it has ended
            total.update(resources(entry.pid))
    return total


def beyond(now: Counter[str], before: Counter[str]) -> list[str]:
    """Return a sentence for each number that is more than it was."""
    return [f"{value} {name}, {before[name]} before" for name, value in now.items() if value > before[name]]


def memory_files(pid: int) -> int:
    """Return the number of files in memory without a name that a process has open or mapped."""
    count = 0
    with suppress(OSError):
        count += sum(SHARED in line for line in (Path("/proc") / str(pid) / "maps").read_text().splitlines())
    for entry in (Path("/proc") / str(pid) / "fd").iterdir():
        with suppress(OSError):
            count += SHARED in str(entry.readlink())
    return count
