"""The gateway's port: accepts clients, and serves each in a task of its own until its connection ends.

A failure of one client, by its own fault or by a bug of ours, must end with its connection and reach no other. A client
for which there is no room gets an error, unless sending it would cost more than serving. A connection ends in an order
that loses nothing: the last response is flushed, then the client has time to read it and close, and only then is the
socket closed.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from math import inf
from typing import TypeAlias

import trio

from protocol.errors import Overloaded, SlowClient, StartFailed
from supervisor.gateway.gateway import Gateway
from supervisor.gateway.http.connection import HttpConnection
from supervisor.gateway.http.routes.route import RouteTable
from supervisor.gateway.outbox import Outbox
from supervisor.gateway.refusals import Refusals
from supervisor.gateway.websocket import session
from supervisor.sockets.bound_sockets import bound_sockets
from supervisor.sockets.descriptor_reserve import GuardedListener
from supervisor.sockets.shared_port import EmptiedListener
from supervisor.sockets.unauthenticated import address_of

log = logging.getLogger(__name__)

Serve: TypeAlias = Callable[[trio.SocketStream], Awaitable[None]]

# Connections that the kernel holds until they are accepted. Of more that come at once, as after a restart, it drops
# parts of the handshake, and resets some. It has its own limit, too (net.core.somaxconn).
BACKLOG = 1024
NO_DESCRIPTORS = (  # the answer to clients for which there is no file descriptor
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
)
# Connections beyond `connections_max` that are answered with an error at a time, however slow they are. More get one
# that is the same for all (`refusals.py`).
REFUSING_MAX = 64


async def serve(
    gateway: Gateway,
    routes: RouteTable,
    host: str,
    port: int,
    *,
    task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve clients on one port until cancelled; `started(port)` means that it listens.

    Where others share the port, it listens once requests can be served: until then clients reach those. Raises
    `StartFailed` if it cannot listen there.
    """
    sockets = await _open_sockets(gateway, host, port)
    gateway.port.number = int(sockets[0].getsockname()[1])
    refusing, refusals = trio.CapacityLimiter(REFUSING_MAX), Refusals()
    async with trio.open_nursery() as connections:
        connections.start_soon(gateway.runner.access.run)
        connections.start_soon(refusals.run)
        connections.start_soon(gateway.streams.run)
        serve_one = partial(serve_stream, gateway, routes, refusing, refusals)
        listen = partial(_listen, gateway, serve_one, sockets, connections)
        if gateway.port.leaving or (gateway.port.shared and gateway.gate.unready() is not None):
            connections.start_soon(listen)
        else:
            await connections.start(listen)
        task_status.started(gateway.port.number)


async def _open_sockets(gateway: Gateway, host: str, port: int) -> list[trio.socket.SocketType]:
    """Return sockets at all addresses of a host; at a shared port they do not listen yet."""
    try:
        shared = gateway.port.shared
        sockets = await bound_sockets(port, host, shared=shared, backlog=None if shared else BACKLOG)
    except OSError as error:
        raise StartFailed(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    for each in sockets:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, gateway.limits.send_buffer_bytes)
    return sockets


async def _listen(  # noqa: ASYNC128  # serve_listeners calls started()
    gateway: Gateway,
    serve: Serve,
    sockets: Sequence[trio.socket.SocketType],
    connections: trio.Nursery,
    *,
    task_status: trio.TaskStatus[object] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Accept clients until the gateway leaves its port, and go on serving the accepted ones."""

    def take(stream: trio.SocketStream) -> None:
        connections.start_soon(_serve_taken, serve, stream)

    listeners = list[trio.abc.Listener[trio.SocketStream]]()
    try:
        with gateway.port.new_listening_scope():
            if gateway.port.shared:
                await gateway.probes.wait_ready()
                _begin_to_listen(gateway, sockets)
            listeners += (_guarded(gateway, each, take) for each in sockets)
            gateway.port.listening_begun()
            await trio.serve_listeners(serve, listeners, handler_nursery=connections, task_status=task_status)
    finally:
        # Listeners close their sockets themselves.
        if not listeners:
            for each in sockets:
                each.close()
        gateway.port.listening_ended()


def _begin_to_listen(gateway: Gateway, sockets: Sequence[trio.socket.SocketType]) -> None:
    """Listen at a shared port; raises `StartFailed` if a socket that does not share it listens there by now."""
    try:
        for each in sockets:
            each.listen(BACKLOG)
    except OSError as error:
        raise StartFailed(f"cannot listen on port {gateway.port.number}: {error.strerror or error}") from error


def _guarded(
    gateway: Gateway, bound: trio.socket.SocketType, take: Callable[[trio.SocketStream], None]
) -> trio.abc.Listener[trio.SocketStream]:
    refused = partial(gateway.runner.metrics.refused, Overloaded.code)
    answer = b"" if gateway.port.tls else NO_DESCRIPTORS
    guarded = GuardedListener(trio.SocketListener(bound), gateway.runtime.reserve, refused, answer)
    if not gateway.port.shared:
        return guarded
    return EmptiedListener(guarded, bound, take, gateway.runtime.reserve, refused, answer)


async def _serve_taken(serve: Serve, stream: trio.SocketStream) -> None:
    """Serve a client that waited at a listener until it was closed."""
    try:
        await serve(stream)
    finally:
        await trio.aclose_forcefully(stream)


async def serve_stream(
    gateway: Gateway,
    routes: RouteTable,
    refusing: trio.CapacityLimiter,
    refusals: Refusals,
    stream: trio.SocketStream,
) -> None:
    """Serve one client, or refuse it if there are too many, with an error response if that is cheap."""
    if gateway.connections.make_room(address := address_of(stream)):
        await _connection(gateway, routes, refusals, stream, address, full=False)
    elif gateway.port.tls is None and refusing.available_tokens:
        async with refusing:
            await _connection(gateway, routes, refusals, stream, address, full=True)
    else:
        gateway.runner.metrics.refused(Overloaded.code)
        # A TLS handshake costs more than a request.
        if gateway.port.tls is None:
            refusals.refuse(stream.socket.fileno())


async def _connection(
    gateway: Gateway, routes: RouteTable, refusals: Refusals, stream: trio.SocketStream, address: str, *, full: bool
) -> None:
    """Serve one client; no exception leaves this function but a cancellation."""
    limits = gateway.limits
    tls = gateway.port.tls
    secure = None if tls is None else trio.SSLStream(stream, tls, server_side=True, https_compatible=True)
    outbox = Outbox(secure or stream, limits.backlog_bytes_max, limits.stall_s, gateway.memory.backlogs)
    connection = HttpConnection(outbox, gateway, routes, partial(session.serve, outbox, gateway))
    scope = trio.CancelScope()
    if not full:
        gateway.connections.add(outbox, connection, address, scope)
    try:
        with scope:
            if secure is None or await _shake_hands(secure, limits.head_s):
                await _run_connection(gateway, outbox, connection, full=full)
    except Exception:
        log.exception("a bug ended a connection")
    finally:
        if outbox.drop_reason is not None:
            gateway.runner.metrics.client_dropped(outbox.drop_reason)
        if not full:
            gateway.connections.remove(outbox)
        # A connection that was closed to make room for another is answered as a refused one.
        if scope.cancelled_caught and secure is None and not outbox.accepted_bytes:
            refusals.refuse(stream.socket.fileno())
        if not outbox.close():
            with trio.move_on_after(limits.close_s, shield=True):
                await outbox.aclose()


async def _shake_hands(secure: trio.SSLStream[trio.SocketStream], within_s: float) -> bool:
    """Return whether the TLS handshake succeeded in time; a failure is the client's, so it is logged at debug level."""
    with trio.move_on_after(within_s):
        try:
            await secure.do_handshake()
        except trio.BrokenResourceError as error:
            log.debug("no TLS: %s", error.__cause__)
        else:
            return True
    return False


async def _run_connection(gateway: Gateway, outbox: Outbox, connection: HttpConnection, *, full: bool) -> None:
    async with trio.open_nursery() as nursery:
        outbox.on_backlog = partial(nursery.start_soon, _drain, outbox, nursery.cancel_scope)
        if full:
            connection.refuse(Overloaded(f"{len(gateway.connections)} clients are connected"))
        else:
            await connection.run()
        await gateway.turns.wait_end()
        # This ends when the client has read everything, or nothing for `stall_s`; a dropped client has `close_s`.
        with trio.move_on_after(inf if outbox.drop_reason is None else gateway.limits.close_s):
            await outbox.wait_flushed()
        if connection.linger_s and not outbox.client_gone:
            with trio.move_on_after(connection.linger_s):
                await outbox.linger()
        nursery.cancel_scope.cancel(reason="the connection has ended")


async def _drain(outbox: Outbox, connection: trio.CancelScope) -> None:
    try:
        await outbox.run()
    except SlowClient as error:
        log.info("a client was dropped", extra={"reason": error.detail})
        connection.cancel(reason="the client does not read")
