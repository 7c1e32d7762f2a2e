"""The port of a gateway: whether clients can connect to it, and with which certificate.

A shared port is left before its gateway drains: new clients then reach the other gateways of the machine, and each
client that has connected here may still make one request.

    made ──listening_begun──> listens ──leave──> leaving ──listening_ended──> closed
      └──────────leave──────────────────────────────┘
"""

from __future__ import annotations

import logging
import ssl

import trio
from attrs import define, field

from protocol.errors import StartFailed
from supervisor.config.certificate import Certificate
from supervisor.files.reading import FileReader

log = logging.getLogger(__name__)

LEFT = "other gateways have the port"


@define(eq=False)
class GatewayPort:
    """The port at which one gateway listens."""

    shared: bool = False  # with other gateways of this machine
    certificate: Certificate | None = None  # None: plain HTTP
    tls: ssl.SSLContext | None = None  # made from `certificate`
    number: int | None = None  # once it is bound
    leaving: bool = False  # each connection closes after its next response
    listens: bool = False  # clients can connect
    _scope: trio.CancelScope | None = None  # in which connections are accepted
    _changed: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    def new_listening_scope(self) -> trio.CancelScope:
        """Return the scope in which the gateway accepts connections."""
        self._scope = trio.CancelScope()
        if self.leaving:
            self._scope.cancel(reason=LEFT)
        return self._scope

    def listening_begun(self) -> None:
        """Note that clients can connect."""
        self.listens = True
        self._changed.unpark_all()

    def listening_ended(self) -> None:
        """Note that no more connections will come: all waiting ones have been taken."""
        self.listens, self._scope = False, None
        self._changed.unpark_all()

    def leave(self) -> None:
        """Stop accepting connections, once all waiting ones have been taken."""
        self.leaving = True
        if self._scope is not None:
            self._scope.cancel(reason=LEFT)
        self._changed.unpark_all()

    async def wait_listening(self) -> None:
        """Wait until clients can connect, or never will again."""
        await trio.lowlevel.checkpoint()
        while not (self.listens or self.leaving):
            await self._changed.park()

    async def wait_left(self) -> None:
        """Wait, after `leave`, until every connection that waited at the port has been taken."""
        while self._scope is not None:
            await self._changed.park()

    async def reload_certificate(self, read: FileReader) -> str | None:
        """Read the certificate again, for new connections; return why it stays as it was, None if it was read."""
        try:
            if self.certificate is not None:
                self.tls = await read(self.certificate.context)
        except StartFailed as error:
            log.error("the certificate stays as it was", extra={"reason": str(error)})  # noqa: TRY400  # no traceback
            return f"the certificate stays as it was: {error}"
        return None
