"""Where decodes meet a prefill: at another port in each life of its engine.

SGLang's decodes remember what they were told at an address for as long as anybody answers there. A prefill that starts
again at the same one, within seconds, is never asked: they wait for the processes of its former life.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress

from attrs import define

from actors.engines.sglang.boot_message import SglangSpec
from protocol.errors import StartFailed
from supervisor.engines.sglang.section import BOOTSTRAP_PORTS


def ports(spec: SglangSpec) -> Sequence[int | None]:
    """Return the ports at which the lives of an engine are met: `BOOTSTRAP_PORTS` of a prefill, one None of others."""
    first = spec.bootstrap_port
    return (None,) if first is None else range(first, first + BOOTSTRAP_PORTS)


@define(eq=False)
class BootstrapPorts:
    """The lives of one engine, as far as its decodes tell them apart."""

    spec: SglangSpec
    now: Callable[[], float]
    _turn: int | None = None  # of the last one

    def another(self) -> int | None:
        """Return where a new life is met: at the free port that no life had for longest, or None if it is no prefill.

        Raises `StartFailed` if no port is free.
        """
        first = self.spec.bootstrap_port
        if first is None:
            return None
        family = socket.AF_INET6 if ":" in self.spec.host else socket.AF_INET
        # The first life's is a matter of time, as the one before may have been another process's.
        begin = int(self.now()) if self._turn is None else self._turn + 1
        for turn in range(begin, begin + BOOTSTRAP_PORTS):
            port = first + turn % BOOTSTRAP_PORTS
            with suppress(OSError), socket.create_server((self.spec.host, port), family=family):
                self._turn = turn
                return port
        last = first + BOOTSTRAP_PORTS - 1
        raise StartFailed(f"engine {self.spec.name}: none of the ports {first} to {last} of {self.spec.host} is free")
