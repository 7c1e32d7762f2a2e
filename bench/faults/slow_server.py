"""A web server that sends a picture so slowly that whoever fetches it is still fetching when a scenario acts."""

from __future__ import annotations

import socket
from contextlib import suppress
from threading import Event, Thread

PICTURE_BYTES = 8 * 1024 * 1024  # that it promises
TRICKLE_S = 0.02  # between two pieces
PIECE = b"\xff" * 512
HEAD = f"HTTP/1.1 200 OK\r\nContent-Type: image/jpeg\r\nContent-Length: {PICTURE_BYTES}\r\n\r\n".encode()


class SlowServer:
    """Listens on a port of loopback; `/silent` never answers, every other path sends a few bytes a second."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = int(self._listener.getsockname()[1])
        self._stopped = Event()
        self._asked: dict[socket.socket, bool] = {}  # the connections that are open, and whether a request has come
        Thread(target=self._accept, daemon=True).start()

    @property
    def asked(self) -> int:
        """The number of open connections on which something is fetched."""
        return sum(list(self._asked.values()))

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._asked)

    def url(self, name: str) -> str:
        """Return the URL of a picture."""
        return f"http://127.0.0.1:{self.port}/{name}"

    def close(self) -> None:
        """End all connections, and listen no more."""
        self._stopped.set()
        for each in (self._listener, *self._asked):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._asked[connection] = False
                Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            head = connection.recv(65_536)
            self._asked[connection] = bool(head)
            if head and not head.startswith(b"GET /silent"):
                connection.sendall(HEAD)
                connection.settimeout(TRICKLE_S)
            while head and not self._stopped.is_set():
                try:
                    head = connection.recv(65_536)  # empty once the client has left
                except TimeoutError:
                    connection.send(PIECE)
        del self._asked[connection]
