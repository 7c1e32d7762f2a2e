"""A TCP proxy before one node, whose connections can be cut, held, slowed down and refused."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from threading import Event, Lock, Thread

READ_BYTES = 65_536
SLOW_CHUNK_BYTES = 512  # of a slow connection, between two pauses
CONNECT_S = 2.0
RESET = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s: the other end gets a reset instead of an end


@dataclass(eq=False)
class ProxiedConnection:
    """One connection and its two ends: the client's and the node's."""

    ends: tuple[socket.socket, socket.socket]
    directions: tuple[Event, Event] = field(default_factory=lambda: (Event(), Event()))  # set while bytes may pass
    pause_s: float = 0.0  # before each piece is sent

    def __post_init__(self) -> None:
        self.flow()

    def flow(self) -> None:
        """Let all bytes pass without a pause from now on."""
        self.pause_s = 0.0
        for direction in self.directions:
            direction.set()

    def hold(self, directions: Iterable[Event]) -> None:
        """Let no byte pass in some of its directions, until `flow` is called."""
        for direction in directions:
            direction.clear()

    def cut(self, *, reset: bool) -> None:
        """Shut down both ends, with a TCP reset if asked for."""
        for end in self.ends:
            with suppress(OSError):
                if reset:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                end.shutdown(socket.SHUT_RDWR)
        self.flow()


class FaultProxy:
    """Listens on a port of its own and forwards every connection to another port."""

    def __init__(self, to: int) -> None:
        self.to = to
        self._refuses_until = 0.0
        self._connections: list[ProxiedConnection] = []
        self._lock = Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        Thread(target=self._accept, daemon=True).start()

    def choose(self, chance: Random) -> ProxiedConnection | None:
        """Return one of the connections, None without any."""
        with self._lock:
            return chance.choice(self._connections) if self._connections else None

    def refuse(self, for_s: float) -> None:
        """Cut every connection, and each new one for so many seconds."""
        self._refuses_until = time.monotonic() + for_s
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.cut(reset=False)

    def heal(self) -> None:
        """Let all bytes and connections pass again."""
        self._refuses_until = 0.0
        with self._lock:
            for connection in self._connections:
                connection.flow()

    def close(self) -> None:
        """Stop listening and cut every connection."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.refuse(0.0)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            Thread(target=self._forward, args=(client,), daemon=True).start()

    def _forward(self, client: socket.socket) -> None:
        try:
            if time.monotonic() < self._refuses_until:
                return
            with socket.create_connection(("127.0.0.1", self.to), CONNECT_S) as node:
                node.settimeout(None)
                for end in (client, node):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._copy_both(ProxiedConnection((client, node)))
        except OSError:
            pass  # the node does not listen: the client's connection ends
        finally:
            client.close()

    def _copy_both(self, connection: ProxiedConnection) -> None:
        client, node = connection.ends
        there, back = connection.directions
        with self._lock:
            self._connections.append(connection)
        backward = Thread(target=self._copy, args=(connection, back, node, client), daemon=True)
        try:
            backward.start()
            self._copy(connection, there, client, node)
            backward.join()
        finally:
            with self._lock:
                self._connections.remove(connection)

    @staticmethod
    def _copy(connection: ProxiedConnection, direction: Event, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(SLOW_CHUNK_BYTES if connection.pause_s else READ_BYTES):
                time.sleep(connection.pause_s)
                direction.wait()
                sink.sendall(data)
        direction.wait()
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
