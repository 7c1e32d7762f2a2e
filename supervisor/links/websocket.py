"""WebSockets between nodes, as the transports of links; whatever a link drains at once is one message."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeAlias, cast

import trio
import trio_websocket
from attrs import define, field, frozen

from actors.kit.groups import first_leaf
from protocol.errors import ActorError, PeerLost, PeerRefused, PeerViolation
from protocol.greeting import Greeter
from protocol.peer import MESSAGE_BYTES_MAX
from supervisor.links.handshake_stream import LimitedStream
from supervisor.links.tls import certificate_names

PATH = "/link"
QUEUED_MESSAGES = 4
READ_BYTES = 256 * 1024
CLOSE_S = 0.25

ConnectionHandler: TypeAlias = Callable[["WebSocketTransport"], Awaitable[None]]
Socket: TypeAlias = trio_websocket.WebSocketConnection
Shake: TypeAlias = Callable[[trio.Nursery, LimitedStream], Awaitable[Socket]]


@frozen
class Endpoint:
    """Where a node listens."""

    host: str
    port: int

    @classmethod
    def read(cls, text: str) -> Endpoint:
        """Return what `host:port` names; an IPv6 address stands in brackets."""
        host, _, port = text.rpartition(":")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    def __str__(self) -> str:
        """Return it as people write it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@define(eq=False)
class WebSocketTransport:
    """One WebSocket as a transport."""

    socket: Socket
    line: LimitedStream

    async def send_all(self, data: bytes) -> None:
        """Send `data` as one message; raises `trio.BrokenResourceError` if the other end is gone."""
        try:
            await self.socket.send_message(data)
        except (trio_websocket.ConnectionClosed, trio.ClosedResourceError) as error:
            raise trio.BrokenResourceError from error

    async def receive_some(self) -> bytes:
        """Return the next message, nothing once the other end is gone; raises `PeerViolation` for one that is text."""
        try:
            while not (message := await self.socket.get_message()):
                pass  # it says nothing, which is not the end
        except (trio_websocket.ConnectionClosed, trio.ClosedResourceError) as error:
            if self.line.too_much:
                raise PeerViolation(self.line.end) from error
            return b""
        if isinstance(message, str):
            raise PeerViolation("a message of text, where frames are expected")
        return message

    def certified(self) -> frozenset[str]:
        """Return the names in the certificate that the other end has shown, none where it has shown none."""
        return certificate_names(self.line.stream)

    def acknowledged_s(self) -> float | None:
        """Return how long ago the other end's kernel last acknowledged anything, as `LimitedStream` does."""
        return self.line.acknowledged_s()


# Both ends ------------------------------------------------------------------------------


@define(eq=False)
class _Shaken:
    """A WebSocket over a line, from its handshake to its end."""

    line: LimitedStream
    shake: Shake
    within_s: float
    talk: ConnectionHandler
    hint: str = ""
    socket: Socket | None = field(default=None, init=False)
    failure: Exception | None = field(default=None, init=False)

    async def run(self) -> None:
        """Raises what `talk` raises, and `PeerLost` or `PeerViolation` for a handshake or a WebSocket that fails."""
        beside: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                try:
                    await self._run(nursery)
                except Exception as error:  # noqa: BLE001  # raised below: here, the nursery would wrap it in a group
                    self.failure = error
                nursery.cancel_scope.cancel(reason="what the WebSocket was for has ended")
        except* Exception as group:  # noqa: BLE001  # what the other end sent has upset the library
            beside = first_leaf(group)
        finally:
            await trio.aclose_forcefully(self.line)
        if isinstance(self.failure, PeerRefused | PeerViolation) or (self.failure is not None and beside is None):
            raise self.failure
        if beside is not None:
            raise PeerViolation(f"it does not speak WebSocket: {type(beside).__name__}") from beside

    async def _run(self, nursery: trio.Nursery) -> None:
        with trio.move_on_after(self.within_s) as patience:
            self.line.on_end = patience.cancel  # the library would wait on
            self.socket = await self.shake(nursery, self.line)
        self.line.on_end = None
        if self.socket is None:
            raise PeerLost(f"no WebSocket with it{self.hint}: {self.line.end or f'not within {self.within_s:g} s'}")
        try:
            await self.talk(WebSocketTransport(self.socket, self.line))
        finally:
            with trio.move_on_after(CLOSE_S, shield=True):
                await self.socket.aclose()


async def _secured(
    stream: trio.SocketStream, tls: ssl.SSLContext | None, within_s: float, host: str | None
) -> trio.SocketStream | trio.SSLStream[trio.SocketStream]:
    """Return the stream, or TLS over it; raises `PeerRefused` if one end does not take the other's certificate."""
    if tls is None:
        return stream
    secure = trio.SSLStream(stream, tls, server_hostname=host, server_side=host is None, https_compatible=True)
    try:
        with trio.fail_after(within_s):
            await secure.do_handshake()
    except (trio.BrokenResourceError, trio.TooSlowError) as error:
        cause = error.__cause__
        if isinstance(cause, ssl.SSLError):
            raise PeerRefused(f"no TLS with it: {said(cause)}") from error
        raise PeerLost("it ended the connection, or said nothing, before TLS was agreed on") from error
    return secure


def said(error: ssl.SSLError) -> str:
    """Return what is wrong with TLS, in words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not taken: {error.verify_message}"
    return str(error.reason or error).lower().replace("_", " ")


# One end each ---------------------------------------------------------------------------


async def dial(at: Endpoint, tls: ssl.SSLContext | None, within_s: float, talk: ConnectionHandler) -> None:
    """Connect to a node and talk to it until `talk` returns; raises `PeerLost` if it cannot be reached."""

    async def shake(nursery: trio.Nursery, line: LimitedStream) -> Socket:
        return await trio_websocket.wrap_client_stream(
            nursery,
            cast("trio.SocketStream", line),  # any stream will do
            str(at),
            PATH,
            message_queue_size=QUEUED_MESSAGES,
            max_message_size=MESSAGE_BYTES_MAX,
            receive_buffer_size=READ_BYTES,
        )

    try:
        with trio.fail_after(within_s):
            stream = await trio.open_tcp_stream(at.host, at.port)
    except (OSError, trio.TooSlowError, ValueError, OverflowError) as error:  # the last two for names that cannot be
        why = f"not within {within_s:g} s" if isinstance(error, trio.TooSlowError) else str(error)
        raise PeerLost(f"{at} cannot be reached: {why}") from error
    try:
        secure = await _secured(stream, tls, within_s, at.host)
        # Whoever listens and refuses a certificate closes the connection; the dialer has heard nothing of it by then.
        hint = "" if tls is None else ", it may not take this node's certificate"
        await _Shaken(LimitedStream(secure), shake, within_s, talk, hint).run()
    finally:
        await trio.aclose_forcefully(stream)


async def accept(
    stream: trio.SocketStream, tls: ssl.SSLContext | None, within_s: float, talk: ConnectionHandler
) -> None:
    """Talk to whoever has connected, once it has asked for a link in time.

    Raises what `talk` raises, and `PeerLost`, `PeerRefused` or `PeerViolation` for whoever does not ask for one.
    """

    async def shake(nursery: trio.Nursery, line: LimitedStream) -> Socket:
        request = await trio_websocket.wrap_server_stream(nursery, line, QUEUED_MESSAGES, MESSAGE_BYTES_MAX, READ_BYTES)
        if request.path != PATH:
            await request.reject(404)
            raise PeerViolation(f"it asked for {request.path[:64]!r}, where links are")
        if any(name.lower() == b"origin" for name, _ in request.headers):  # a browser's, who may reach loopback too
            await request.reject(403)
            raise PeerViolation("a web page asked for a link")
        return await request.accept()

    try:
        await _Shaken(LimitedStream(await _secured(stream, tls, within_s, None)), shake, within_s, talk).run()
    finally:
        await trio.aclose_forcefully(stream)


async def greet(wire: WebSocketTransport, greeter: Greeter, within_s: float) -> str:
    """Return the name that the other end has proved.

    Raises `PeerRefused` if either end does not talk to the other, `PeerLost` if it says nothing in time.
    """
    refused: PeerRefused | PeerViolation | None = None
    with trio.move_on_after(within_s):
        try:
            await _send(wire, greeter.start())
            while greeter.peer is None:
                if not (message := await wire.receive_some()):
                    ended = f": {wire.line.end}" if wire.line.end else ""
                    raise PeerLost(f"the other end closed the link before it said who it is{ended}")
                await _send(wire, greeter.receive(message))
        except (PeerRefused, PeerViolation) as error:
            refused = error
        if refused is None and greeter.peer is not None:
            wire.line.trust()
            return greeter.peer
        if greeter.last_words:
            await _send(wire, [greeter.last_words])
    raise refused or PeerLost(f"the other end did not say who it is within {within_s:g} s")


async def _send(wire: WebSocketTransport, messages: list[bytes]) -> None:
    with suppress(trio.BrokenResourceError):  # whoever reads sees the end too
        for message in messages:
            await wire.send_all(message)


async def run_in_nursery(body: Callable[[trio.Nursery], Awaitable[None]]) -> None:
    """Run `body` with tasks beside it that end with it; an `ActorError` comes out as it is and not in a group."""
    failure: ActorError | None = None
    async with trio.open_nursery() as nursery:
        try:
            await body(nursery)
        except ActorError as error:
            failure = error
        nursery.cancel_scope.cancel(reason="what it was for has ended")
    if failure is not None:
        raise failure
