"""WebSockets between nodes, as the transports of links: dialing, accepting, TLS and the greeting.

A WebSocket costs a link little, and passes through proxies, service meshes and port forwards. Each write of a link is
one message. The library does not expect arbitrary bytes, so it runs in a nursery of its own, whose exceptions become a
`PeerViolation`, over a stream with a limit for the handshake.
"""

from __future__ import annotations

import ssl
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeAlias, cast

import trio
import trio_websocket
from attrs import define, field

from actors.kit.groups import first_leaf
from protocol.errors import ActorError, LocalViolation, PeerLost, PeerRefused, PeerViolation
from protocol.link.greeting import Greeter
from protocol.link.peer import MESSAGE_BYTES_MAX
from supervisor.links.endpoint import Endpoint
from supervisor.links.handshake_stream import LimitedStream
from supervisor.links.tls import certificate_names

PATH = "/link"
QUEUED_MESSAGES = 4
READ_BYTES = 256 * 1024
LONG_BYTES = 2**16  # of a message that is written without the library; its length takes eight bytes
LONG_HEAD = struct.Struct("!BBQ")  # of a whole binary message in one frame
BINARY, LENGTH_FOLLOWS, MASKED = 0x82, 127, 0x80
ZERO_MASK = bytes(4)
CLOSE_S = 0.25
HANDSHAKE_S = 5.0  # the limit for TLS, the upgrade and the greeting of a connection, each by itself

ConnectionHandler: TypeAlias = Callable[["WebSocketTransport"], Awaitable[None]]
Dial: TypeAlias = Callable[[Endpoint, ssl.SSLContext | None, float, ConnectionHandler], Awaitable[None]]
Accept: TypeAlias = Callable[[trio.SocketStream, ssl.SSLContext | None, float, ConnectionHandler], Awaitable[None]]
Socket: TypeAlias = trio_websocket.WebSocketConnection
LinkHandshake: TypeAlias = Callable[[trio.Nursery, LimitedStream], Awaitable[Socket]]


@define(eq=False)
class WebSocketTransport:
    """One WebSocket as the transport of a link."""

    socket: Socket
    stream: LimitedStream

    async def send_all(self, data: bytes) -> None:
        """Send `data` as one message; raises `trio.BrokenResourceError` if the other end is gone."""
        try:
            if len(data) < LONG_BYTES:
                await self.socket.send_message(data)
            else:
                await self._send_long(data)
        except (trio_websocket.ConnectionClosed, trio.ClosedResourceError) as error:
            raise trio.BrokenResourceError from error

    async def _send_long(self, data: bytes) -> None:
        """Write a message as one frame; the library would copy and mask a prompt of 500 kB in 2.5 ms.

        A client's mask is for browsers, in which scripts of strangers choose the bytes. Here both ends have proved
        their names, so it is zero, as the standard's format allows and all parsers read it.
        """
        if self.socket.closed:
            raise trio.BrokenResourceError("the WebSocket is closed")
        head = LONG_HEAD.pack(BINARY, LENGTH_FOLLOWS | (MASKED if self.socket.is_client else 0), len(data))
        mask = ZERO_MASK if self.socket.is_client else b""
        await self.stream.send_all(b"".join((head, mask, data)))

    async def receive_some(self) -> bytes:
        """Return the next message, nothing once the other end is gone; raises `PeerViolation` for a text message."""
        try:
            while not (message := await self.socket.get_message()):
                pass  # an empty message is not the end
        except (trio_websocket.ConnectionClosed, trio.ClosedResourceError) as error:
            if self.stream.limit_exceeded:
                raise PeerViolation(self.stream.end_reason) from error
            return b""
        if isinstance(message, str):
            raise PeerViolation("a message of text, where frames are expected")
        return message

    def certificate_names(self) -> frozenset[str]:
        """Return the names in the other end's certificate, none without a certificate."""
        return certificate_names(self.stream.stream)

    def acknowledged_s(self) -> float | None:
        """Return the seconds since the last acknowledgement of the other kernel, as `LimitedStream` does."""
        return self.stream.acknowledged_s()


# Both ends ------------------------------------------------------------------------------


@define(eq=False)
class _Connection:
    """A WebSocket over a stream, from its handshake to its end."""

    stream: LimitedStream
    handshake: LinkHandshake
    within_s: float
    handler: ConnectionHandler
    hint: str = ""
    socket: Socket | None = field(default=None, init=False)
    failure: Exception | None = field(default=None, init=False)

    async def run(self) -> None:
        """Run the handler; raises its exception, or `PeerLost` or `PeerViolation` for a failed WebSocket."""
        library_error: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                try:
                    await self._run(nursery)
                except Exception as error:  # noqa: BLE001  # raised below: here the nursery would wrap it in a group
                    self.failure = error
                nursery.cancel_scope.cancel(reason="the handler has ended")
        except* Exception as group:  # noqa: BLE001  # the library does not expect what the other end sent
            library_error = first_leaf(group)
        finally:
            await trio.aclose_forcefully(self.stream)
        if isinstance(self.failure, PeerRefused | PeerViolation | LocalViolation) or (
            self.failure is not None and library_error is None
        ):
            raise self.failure
        if library_error is not None:
            raise PeerViolation(f"it does not speak WebSocket: {type(library_error).__name__}") from library_error

    async def _run(self, nursery: trio.Nursery) -> None:
        with trio.move_on_after(self.within_s) as deadline:
            self.stream.on_end = deadline.cancel  # the library would go on waiting
            self.socket = await self.handshake(nursery, self.stream)
        self.stream.on_end = None
        if self.socket is None:
            raise PeerLost(
                f"no WebSocket with it{self.hint}: {self.stream.end_reason or f'not within {self.within_s:g} s'}"
            )
        try:
            await self.handler(WebSocketTransport(self.socket, self.stream))
        finally:
            with trio.move_on_after(CLOSE_S, shield=True):
                await self.socket.aclose()


async def _secured(
    stream: trio.SocketStream, tls: ssl.SSLContext | None, within_s: float, host: str | None
) -> trio.SocketStream | trio.SSLStream[trio.SocketStream]:
    """Return the stream, or TLS over it; raises `PeerRefused` if one end does not accept the other's certificate."""
    if tls is None:
        return stream
    secure = trio.SSLStream(stream, tls, server_hostname=host, server_side=host is None, https_compatible=True)
    try:
        with trio.fail_after(within_s):
            await secure.do_handshake()
    except (trio.BrokenResourceError, trio.TooSlowError) as error:
        cause = error.__cause__
        if isinstance(cause, ssl.SSLError):
            raise PeerRefused(f"no TLS with it: {tls_error_text(cause)}") from error
        raise PeerLost("it ended the connection, or said nothing, before TLS was agreed on") from error
    return secure


def tls_error_text(error: ssl.SSLError) -> str:
    """Return a sentence about a TLS error."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not taken: {error.verify_message}"
    return str(error.reason or error).lower().replace("_", " ")


# One end each ---------------------------------------------------------------------------


async def dial(endpoint: Endpoint, tls: ssl.SSLContext | None, within_s: float, handler: ConnectionHandler) -> None:
    """Connect to a node and run `handler` with the WebSocket; raises `PeerLost` if it cannot be reached.

    `within_s` bounds the connection, TLS and the handshake of the WebSocket, each by itself.
    """

    async def handshake(nursery: trio.Nursery, limited: LimitedStream) -> Socket:
        return await trio_websocket.wrap_client_stream(
            nursery,
            cast("trio.SocketStream", limited),  # any stream will do
            str(endpoint),
            PATH,
            message_queue_size=QUEUED_MESSAGES,
            max_message_size=MESSAGE_BYTES_MAX,
            receive_buffer_size=READ_BYTES,
        )

    try:
        with trio.fail_after(within_s):
            stream = await trio.open_tcp_stream(endpoint.host, endpoint.port)
    except (OSError, trio.TooSlowError, ValueError, OverflowError) as error:  # the last two for impossible names
        reason = f"not within {within_s:g} s" if isinstance(error, trio.TooSlowError) else str(error)
        raise PeerLost(f"{endpoint} cannot be reached: {reason}") from error
    try:
        secure = await _secured(stream, tls, within_s, endpoint.host)
        # An end that refuses a certificate closes the connection without a reason.
        hint = "" if tls is None else ", it may not take this node's certificate"
        await _Connection(LimitedStream(secure), handshake, within_s, handler, hint).run()
    finally:
        await trio.aclose_forcefully(stream)


async def accept(
    stream: trio.SocketStream, tls: ssl.SSLContext | None, within_s: float, handler: ConnectionHandler
) -> None:
    """Run `handler` for a connection that asks for a link in time, then close it.

    Raises the exception of `handler`, or `PeerLost`, `PeerRefused` or `PeerViolation` without a request for a link.
    """

    async def handshake(nursery: trio.Nursery, limited: LimitedStream) -> Socket:
        request = await trio_websocket.wrap_server_stream(
            nursery, limited, QUEUED_MESSAGES, MESSAGE_BYTES_MAX, READ_BYTES
        )
        if request.path != PATH:
            await request.reject(404)
            raise PeerViolation(f"it asked for {request.path[:64]!r}, where links are")
        if any(name.lower() == b"origin" for name, _ in request.headers):  # a browser, which may reach loopback as well
            await request.reject(403)
            raise PeerViolation("a web page asked for a link")
        return await request.accept()

    try:
        await _Connection(
            LimitedStream(await _secured(stream, tls, within_s, None)), handshake, within_s, handler
        ).run()
    finally:
        await trio.aclose_forcefully(stream)


async def greet(transport: WebSocketTransport, greeter: Greeter, within_s: float) -> str:
    """Exchange greetings, and return the proved name of the other end.

    Raises `PeerRefused` if either end refuses the other, `PeerLost` if there is no greeting in time.
    """
    refused: PeerRefused | PeerViolation | None = None
    with trio.move_on_after(within_s):
        try:
            await _send(transport, greeter.start())
            while greeter.peer is None:
                if not (message := await transport.receive_some()):
                    ended = f": {transport.stream.end_reason}" if transport.stream.end_reason else ""
                    raise PeerLost(f"the other end closed the link before it said who it is{ended}")
                await _send(transport, greeter.receive(message))
        except (PeerRefused, PeerViolation) as error:
            refused = error
        if refused is None and greeter.peer is not None:
            transport.stream.lift_limit()
            return greeter.peer
        if greeter.final_message:
            await _send(transport, [greeter.final_message])
    raise refused or PeerLost(f"the other end did not say who it is within {within_s:g} s")


async def _send(transport: WebSocketTransport, messages: list[bytes]) -> None:
    with suppress(trio.BrokenResourceError):  # the next read reports the same end
        for message in messages:
            await transport.send_all(message)


async def run_in_nursery(body: Callable[[trio.Nursery], Awaitable[None]]) -> None:
    """Run `body` with a nursery whose tasks end with it; an `ActorError` of `body` is raised bare, not in a group."""
    failure: ActorError | None = None
    async with trio.open_nursery() as nursery:
        try:
            await body(nursery)
        except ActorError as error:
            failure = error
        nursery.cancel_scope.cancel(reason="the body has ended")
    if failure is not None:
        raise failure
