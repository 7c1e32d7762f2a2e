"""A web server that sends a picture so slowly that whoever fetches it is still fetching when a bench acts."""

from __future__ import annotations

import selectors
import socket
from contextlib import suppress
from threading import Event, Lock, Thread

PICTURE_BYTES = 8 * 1024 * 1024  # that it promises
TRICKLE_S = 0.02  # between two pieces
PIECE = b"\xff" * 512
HEAD = f"HTTP/1.1 200 OK\r\nContent-Type: image/jpeg\r\nContent-Length: {PICTURE_BYTES}\r\n\r\n".encode()


class SlowServer:
    """Listens on a port of loopback; `/silent` never answers, every other path sends a few bytes a second."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = int(self._listener.getsockname()[1])
        self._stopped, self._lock = Event(), Lock()
        self._asked: dict[socket.socket, bool] = {}  # the connections that are open, and whether a request has come
        self._thread = Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def asked(self) -> int:
        """The number of open connections on which something is fetched."""
        with self._lock:
            return sum(self._asked.values())

    @property
    def connections(self) -> int:
        """The number of open connections."""
        with self._lock:
            return len(self._asked)

    def url(self, name: str) -> str:
        """Return the URL of a picture."""
        return f"http://127.0.0.1:{self.port}/{name}"

    def close(self) -> None:
        """End all connections, and listen no more."""
        self._stopped.set()
        self._thread.join(5.0)
        with self._lock:
            for each in (self._listener, *self._asked):
                each.close()
            self._asked.clear()

    def _serve(self) -> None:
        trickling: set[socket.socket] = set()
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._stopped.is_set():
                for key, _ in selector.select(TRICKLE_S):
                    if key.fileobj is self._listener:
                        connection, _ = self._listener.accept()
                        connection.setblocking(False)
                        selector.register(connection, selectors.EVENT_READ)
                        with self._lock:
                            self._asked[connection] = False
                    else:
                        self._read(key.fileobj, selector, trickling)
                for connection in trickling:
                    with suppress(OSError):  # its end is read next
                        connection.send(PIECE)

    def _read(self, connection: object, selector: selectors.BaseSelector, trickling: set[socket.socket]) -> None:
        assert isinstance(connection, socket.socket)
        head = b""
        with suppress(ConnectionError):
            head = connection.recv(65_536)
        if not head:
            selector.unregister(connection)
            trickling.discard(connection)
            connection.close()
            with self._lock:
                del self._asked[connection]
            return
        if not head.startswith(b"GET /silent"):
            connection.send(HEAD)
            trickling.add(connection)
        with self._lock:
            self._asked[connection] = True
