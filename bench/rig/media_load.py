"""Everything that a cluster with an encoder holds for its requests, read from `/metrics` and `/proc`.

One number for each place where a request may leave something: the budgets of the media actor, its decoders' processes,
what waits for the encoder or is in its batch, tensors and streams on links, slots and KV memory of engines, requests of
the front. The front's scrape has the load of every engine of the cluster; the queue of the encoder is at its own node.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from http.client import HTTPConnection
from pathlib import Path

from bench.rig.cluster import FRONT, Cluster
from bench.rig.node import Node, wait_until
from bench.rig.polling import GIVE_UP_S, REACHED_S, SETTLE_S, RequestNotReleased
from bench.rig.processes import open_files, process_table, shared_memory_names, threads
from bench.rig.vision_cluster import ENCODER

WATCHED = (
    *("espalier_requests_running", "espalier_requests_waiting"),
    *("espalier_media_bytes", "espalier_media_running", "espalier_media_waiting"),
    *("espalier_shared_memory_bytes", "espalier_shared_memory_waiting"),
    *("espalier_encoder_queue_items", "espalier_link_attached_bytes", "espalier_link_streams"),
    *("espalier_engine_running", "espalier_engine_waiting", "espalier_engine_kv_tokens_used"),
    "espalier_engine_requests_assigned",
)
POLLED = (FRONT, ENCODER)
DECODERS = "decoders"  # processes
TEMPLATE = "actors.media_decoder"  # in the command of the process that forks them
SHARED = "memfd:"
SERVED = 'side="served"'  # streams, of which a scrape of the asking node opens some for a moment


@dataclass(frozen=True)
class MediaLoad:
    """The numbers at one moment, by the node and the name of the series."""

    held: Mapping[str, float]
    at: float

    def total(self, *words: str) -> float:
        """Return the sum of the numbers whose names contain all words; `AssertionError` if there are none."""
        values = [value for name, value in self.held.items() if all(word in name for word in words)]
        assert values, f"no node has a series with {words}"
        return sum(values)

    @property
    def idle(self) -> bool:
        """Whether nothing is held."""
        return not any(self.held.values())

    def within(self, other: MediaLoad) -> bool:
        """Whether nothing is held that was not held then."""
        return all(value <= other.held.get(name, 0.0) for name, value in self.held.items())

    def sentences(self) -> list[str]:
        """Return what is held."""
        return [f"{name} is {value:g}" for name, value in self.held.items() if value]


def series(text: str) -> dict[str, float]:
    """Return the watched series of a scrape."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith(WATCHED) and SERVED not in line:
            name, _, value = line.rpartition(" ")
            found[name.removeprefix("espalier_")] = float(value)
    return found


@dataclass
class MediaPoller:
    """Scrapes the front and the encoder's node, `pause_s` apart."""

    target: Cluster
    pause_s: float = 0.002
    outside: Callable[[], float] = lambda: 0.0  # what is held elsewhere, such as connections to a server of the bench
    periods: list[float] = field(default_factory=list)
    _connections: dict[str, HTTPConnection] = field(default_factory=dict)
    _template: int = 0

    def __post_init__(self) -> None:
        self._template = template_of(self.target.front)

    def read(self, others: Sequence[str] = ()) -> MediaLoad:
        """Return what the front and the encoder's node hold, and these other nodes."""
        began_at = time.perf_counter()
        for name in POLLED:
            if name not in self._connections:
                self._connections[name] = HTTPConnection("127.0.0.1", self.target.nodes[name].port, timeout=GIVE_UP_S)
            self._connections[name].request("GET", "/metrics")
        texts = {name: self._connections[name].getresponse().read().decode() for name in POLLED}
        texts |= {name: self.target.nodes[name].get("/metrics")[1].decode() for name in others}
        held = {f"{name} {key}": value for name, text in texts.items() for key, value in series(text).items()}
        held[DECODERS] = float(len(children(self._template)))
        held["outside"] = self.outside()
        now = time.perf_counter()
        self.periods.append(now - began_at + self.pause_s)
        return MediaLoad(held, now)

    def wait(self, holds: Callable[[MediaLoad], bool], within_s: float = REACHED_S) -> bool:
        """Wait until `holds` is true of the load, up to `within_s`; return whether it was."""
        return wait_until(lambda: holds(self.read()), within_s, self.pause_s) is not None

    def until(self, free: Callable[[MediaLoad], bool], since: float) -> float:
        """Return how long after `since` the load was `free` for good, in seconds; raises `RequestNotReleased`."""
        free_at = None
        while True:
            load = self.read()
            free_at = (free_at or load.at) if free(load) else None
            if free_at is not None and load.at - free_at > SETTLE_S:
                return free_at - since
            if load.at - since > GIVE_UP_S:
                held = "; ".join(load.sentences())
                raise RequestNotReleased(f"{GIVE_UP_S:g} s after its client had left, something was still held: {held}")
            time.sleep(self.pause_s)

    def until_idle(self, since: float) -> float:
        """Return how long after `since` nothing was held for good."""
        return self.until(lambda load: load.idle, since)

    def close(self) -> None:
        """Close its connections."""
        for each in self._connections.values():
            each.close()


def template_of(node: Node) -> int:
    """Return the process that forks the decoders of a node."""
    ours = {node.pid}
    return next(entry.pid for entry in process_table() if entry.parent in ours and TEMPLATE in entry.command)


def children(pid: int) -> list[int]:
    """Return the children of a process, zombies included."""
    with suppress(OSError):
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


@dataclass(frozen=True)
class Remains:
    """The descriptors, files, threads and shared memory of the processes of a node."""

    descriptors: int
    memory_files: int  # without a name, open or mapped
    threads: int
    shared_memory: int  # names under /dev/shm

    def within(self, other: Remains) -> bool:
        """Whether nothing is more than it was."""
        return not self.beyond(other)

    def beyond(self, other: Remains) -> list[str]:
        """Return a sentence for each number that is more than it was."""
        pairs = ((name, value, asdict(other)[name]) for name, value in asdict(self).items())
        return [f"{value} {name.replace('_', ' ')}, {was} before" for name, value, was in pairs if value > was]


def remains(node: Node) -> Remains:
    """Return what the processes of a node hold now."""
    total = [0, 0, 0, 0]
    for entry in node.living():
        with suppress(OSError):  # it has ended
            counts = open_files(entry.pid), memory_files(entry.pid), threads(entry.pid), shared_names(entry.pid)
            total = [value + more for value, more in zip(total, counts, strict=True)]
    return Remains(*total)


def shared_names(pid: int) -> int:
    """Return the number of names under /dev/shm that a process has mapped."""
    return len(shared_memory_names(pid))


def ended_children_cpu_s(pid: int) -> float:
    """Return the CPU time of the children of a process that have ended, such as decoders."""
    fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[13:15])) / os.sysconf("SC_CLK_TCK")


def memory_files(pid: int) -> int:
    """Return the number of files in memory without a name that a process has open or mapped."""
    count = 0
    with suppress(OSError):
        count += sum(SHARED in line for line in (Path("/proc") / str(pid) / "maps").read_text().splitlines())
    for entry in (Path("/proc") / str(pid) / "fd").iterdir():
        with suppress(OSError):
            count += SHARED in str(entry.readlink())
    return count
