"""The gateway: one port where clients knock, by HTTP or by WebSocket."""

from __future__ import annotations

import logging
import socket
from functools import partial

import trio

from protocol.errors import Overloaded, SlowClient, StartFailed
from supervisor.doors import websocket
from supervisor.doors.door import Door
from supervisor.doors.http import HttpConnection
from supervisor.doors.outbox import Outbox

log = logging.getLogger(__name__)

BACKLOG = 128  # connections that the kernel holds for us


async def gateway(
    door: Door, host: str, port: int, *, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED
) -> None:
    """Serve clients on one port until cancelled; `started(port)` means that it listens.

    Raises `StartFailed` if the port cannot be had.
    """
    try:
        listeners = await trio.open_tcp_listeners(port, host=host, backlog=BACKLOG)
    except OSError as error:
        raise StartFailed(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    async with trio.open_nursery() as connections:
        for listener in listeners:
            listener.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, door.limits.send_buffer_bytes)
        serving = partial(trio.serve_listeners, partial(_connection, door), listeners, handler_nursery=connections)
        await connections.start(serving)
        door.port = int(listeners[0].socket.getsockname()[1])
        task_status.started(door.port)


async def _connection(door: Door, stream: trio.SocketStream) -> None:
    """Serve one client; whatever goes wrong with it is its own affair."""
    limits = door.limits
    outbox = Outbox(stream, limits.backlog_bytes_max, limits.stall_s)
    connection = HttpConnection(outbox, door, partial(websocket.serve, outbox, door))
    full = len(door.connections) >= limits.connections_max
    if not full:
        door.connections[outbox] = connection
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_drained, outbox, nursery.cancel_scope)
            if full:
                connection.refuse(Overloaded(f"{len(door.connections)} clients are connected"))
            else:
                await connection.run()
            with trio.move_on_after(limits.close_s):
                await outbox.wait_flushed()
                if connection.unheard and not outbox.gone:
                    await outbox.hear_out()
            nursery.cancel_scope.cancel(reason="the connection has ended")
    except Exception:
        log.exception("a bug ended a connection")
    finally:
        if not full:
            door.forget(outbox)
        with trio.move_on_after(limits.close_s, shield=True):
            await outbox.aclose()


async def _drained(outbox: Outbox, connection: trio.CancelScope) -> None:
    try:
        await outbox.run()
    except SlowClient as error:
        log.info("a client was dropped", extra={"reason": error.detail})
        connection.cancel(reason="the client does not read")
