"""The bootstrap servers of prefills, as a decode's node reaches them.

SGLang's scheduler asks a prefill that it does not know inside its own loop, for up to five seconds: where packets are
dropped, by a firewall or because a host has no power, all streams of the decode stand still meanwhile, and two such
prefills make it silent. So its node asks first, without hurry for anybody: a request whose prefill does not answer
fails alone, and may go on with another one. What was found counts for a while, so that few requests wait.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio
from attrs import define, field

from actors.engines.sglang.hand_off import Rendezvous
from protocol.errors import HandOffFailed

ANSWER_S = 1.0
REACHED_S = 30.0  # for which an answer counts; a prefill has another port in each of its lives
FAILED_S = 5.0  # for which a failure counts
ADDRESSES_MAX = 1024  # addresses that are remembered

log = logging.getLogger(__name__)


@define(eq=False)
class _Address:
    """One bootstrap server: what the last connection found, until when that counts, and whether one is tried now."""

    until: float = 0.0
    failure: str | None = None
    trying: trio.Event | None = None


@define(eq=False)
class BootstrapAddresses:
    """The addresses of bootstrap servers that requests have named, the latest last."""

    connect: Callable[[str, int], Awaitable[trio.abc.HalfCloseableStream]] = trio.open_tcp_stream
    _addresses: dict[tuple[str, int], _Address] = field(factory=dict)

    def reach(self, hand_off: bytes) -> Awaitable[None] | None:
        """Return None if the prefill of a hand-off was reached lately, else what waits for an answer from it.

        That raises `HandOffFailed` if there is none within `ANSWER_S`. Bytes that name no prefill are the engine's to
        refuse.
        """
        try:
            rendezvous = Rendezvous.decode(hand_off)
        except HandOffFailed:
            return None
        if not rendezvous.has_partner:
            return None
        key = rendezvous.host, rendezvous.port
        address = self._addresses.get(key)
        if address is not None and address.failure is None and trio.current_time() < address.until:
            return None
        return self._reach(*key)

    async def _reach(self, host: str, port: int) -> None:
        await trio.lowlevel.checkpoint()
        address = self._addresses.pop((host, port), None) or _Address()
        self._addresses[host, port] = address
        while len(self._addresses) > ADDRESSES_MAX:
            del self._addresses[next(iter(self._addresses))]
        while trio.current_time() >= address.until:
            if address.trying is not None:
                await address.trying.wait()
                continue
            address.trying = trio.Event()
            try:
                address.failure = await self._failure(host, port)
                lasts_s = REACHED_S if address.failure is None else FAILED_S
                address.until = trio.current_time() + lasts_s
            finally:  # a request that leaves lets the next one try
                address.trying.set()
                address.trying = None
            if address.failure is not None:
                extra = {"address": f"{host}:{port}", "reason": address.failure}
                log.warning("a prefill cannot be reached", extra=extra)
        if address.failure is not None:
            raise HandOffFailed(f"the prefill at port {port} of {host} cannot be reached: {address.failure}")

    async def _failure(self, host: str, port: int) -> str | None:
        """Return why a bootstrap server does not answer in time, None if it does, be it with an error."""
        try:
            with trio.fail_after(ANSWER_S):
                stream = await self.connect(host, port)
                try:
                    await stream.send_all(b"GET /health HTTP/1.1\r\nHost: bootstrap\r\nConnection: close\r\n\r\n")
                    answer = await stream.receive_some(1)
                finally:
                    await trio.aclose_forcefully(stream)
        except trio.TooSlowError:
            return f"no answer within {ANSWER_S:g} s"
        except OSError as error:
            return error.strerror or str(error)
        except trio.BrokenResourceError:
            answer = b""
        return None if answer else "it closes connections without an answer"
