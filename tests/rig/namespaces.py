"""Hosts of a network of their own: network namespaces of this machine, whose interfaces meet at a bridge.

Each host has one interface with an address of its own and its own loopback; the bridge is in a namespace as well, so
that nothing of it is visible outside. A link can be slowed down and cut at the bridge: then no packet comes through,
and neither kernel is told why, as when a cable is pulled. All of it is removed at the end; whatever runs in a host is
ended by whoever started it.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import TypeVar

from attrs import frozen

T = TypeVar("T")
CLONE_NEWNET = 0x40000000
WITHIN_S = 10.0
NAMESPACES = Path("/run/netns")


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=WITHIN_S)


def _enter(descriptor: int) -> None:
    """Move the calling thread into a network namespace."""
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def why_not() -> str:
    """Return why this machine lets nobody make network namespaces here; empty if it does."""
    name = f"es{os.getpid()}-try"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "netns", "exec", name, "ip", "link", "add", "one", "type", "bridge")
        _run("ip", "netns", "exec", name, "ip", "link", "add", "two", "type", "veth", "peer", "name", "three")
    except FileNotFoundError:
        return "there is no ip command (iproute2)"
    except (subprocess.SubprocessError, OSError) as error:
        return f"network namespaces cannot be made: {getattr(error, 'stderr', '') or error}".strip()
    finally:
        if (NAMESPACES / name).exists():
            _run("ip", "netns", "del", name)
    return ""


@frozen
class Network:
    """The hosts of a network, by their names."""

    prefix: str
    hosts: Sequence[str]

    def address(self, host: str) -> str:
        """Return the address of a host."""
        return f"10.77.0.{self.hosts.index(host) + 1}"

    def command(self, host: str) -> tuple[str, ...]:
        """Return a command that runs what follows it in a host."""
        return "ip", "netns", "exec", self._namespace(host)

    def inside(self, host: str, function: Callable[[], T]) -> T:
        """Return what a function returns in a host; sockets that it opens are of that host."""
        results: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                with (NAMESPACES / self._namespace(host)).open() as namespace:
                    _enter(namespace.fileno())
                results.append(function())
            except BaseException as error:  # noqa: BLE001  # it is raised again, in the thread of the caller
                errors.append(error)

        thread = Thread(target=run)
        thread.start()
        thread.join()
        for error in errors:
            raise error
        return results[0]

    def cut(self, host: str) -> None:
        """Let no packet from or to a host through the bridge."""
        self._at_bridge("ip", "link", "set", host, "down")

    def join(self, host: str) -> None:
        """Let packets through again."""
        self._at_bridge("ip", "link", "set", host, "up")

    def slow(self, host: str, megabits: int) -> None:
        """Limit what is sent to a host; raises `CalledProcessError` if the kernel cannot."""
        rate = ("rate", f"{megabits}mbit", "burst", "64kb", "latency", "500ms")
        self._at_bridge("tc", "qdisc", "replace", "dev", host, "root", "tbf", *rate)

    def make(self) -> None:
        """Make the hosts, the bridge, and what lies between them."""
        for name in ("bridge", *self.hosts):
            _run("ip", "netns", "add", self._namespace(name))
        self._at_bridge("ip", "link", "add", "bridge", "type", "bridge")
        self._at_bridge("ip", "link", "set", "bridge", "up")
        for host in self.hosts:
            peer = ("peer", "name", "eth0", "netns", self._namespace(host))
            self._at_bridge("ip", "link", "add", host, "type", "veth", *peer)
            self._at_bridge("ip", "link", "set", host, "master", "bridge", "up")
            _run(*self.command(host), "ip", "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run(*self.command(host), "ip", "link", "set", device, "up")

    def remove(self) -> None:
        """Remove all of it; interfaces end with their namespaces."""
        for name in ("bridge", *self.hosts):
            if (NAMESPACES / self._namespace(name)).exists():
                _run("ip", "netns", "del", self._namespace(name))

    def left(self) -> list[str]:
        """Return the namespaces that are still there."""
        return sorted(each.name for each in NAMESPACES.glob(f"{self.prefix}-*"))

    def _namespace(self, name: str) -> str:
        return f"{self.prefix}-{name}"

    def _at_bridge(self, *words: str) -> None:
        _run(*self.command("bridge"), *words)


@contextmanager
def network(*hosts: str) -> Iterator[Network]:
    """Yield a network of so many hosts, and remove it."""
    made = Network(f"es{os.getpid()}", hosts)
    try:
        made.make()
        yield made
    finally:
        made.remove()
