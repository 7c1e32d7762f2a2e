"""The bootstrap port of a prefill: another one in each life of its engine.

SGLang's decodes keep what a prefill told them for as long as any process answers at its address. If the engine started
again at the same port within seconds, they would go on waiting for the processes of its former life, and never ask the
new ones. So a prefill has a range of ports, and no life may take the port of the one before it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeAlias

import trio
from attrs import define

from actors.engines.sglang.spec import SglangSpec
from protocol.errors import StartFailed
from supervisor.engines.sglang.section import BOOTSTRAP_PORTS
from supervisor.sockets.bound_sockets import SocketAddress, bind_all, resolved

NextPort: TypeAlias = Callable[[], Awaitable[int | None]]


def ports(spec: SglangSpec) -> Sequence[int | None]:
    """Return the ports that lives of an engine may have: `BOOTSTRAP_PORTS` of a prefill, None of any other engine."""
    first = spec.bootstrap_port
    return (None,) if first is None else range(first, first + BOOTSTRAP_PORTS)


@define(eq=False)
class BootstrapPorts:
    """Chooses the bootstrap port of each life of one engine."""

    spec: SglangSpec
    now: Callable[[], float]
    _index: int | None = None  # of the last port

    async def next_port(self) -> int | None:
        """Return the free port that no life has had for longest, None if the engine is no prefill.

        Raises `StartFailed` if no port is free, or its host cannot be found.
        """
        await trio.lowlevel.checkpoint()
        first = self.spec.bootstrap_port
        if first is None:
            return None
        addresses = await self._addresses()
        # The first one depends on the time, as the life before it may have been of an earlier node process.
        begin = int(self.now()) if self._index is None else self._index + 1
        for index in range(begin, begin + BOOTSTRAP_PORTS):
            port = first + index % BOOTSTRAP_PORTS
            with suppress(OSError):
                for bound in bind_all(addresses, port):
                    bound.close()
                self._index = index
                return port
        last = first + BOOTSTRAP_PORTS - 1
        raise StartFailed(f"engine {self.spec.name}: none of the ports {first} to {last} of {self.spec.host} is free")

    async def _addresses(self) -> Sequence[SocketAddress]:
        """Return the addresses of the host, whose name may take seconds to resolve."""
        try:
            return await resolved(self.spec.host)
        except OSError as error:
            why = error.strerror or error
            raise StartFailed(f"engine {self.spec.name}: its host {self.spec.host} cannot be found: {why}") from error
