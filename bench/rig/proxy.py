"""A TCP proxy before one node: it passes bytes on until it is told to cut, hold, slow or refuse connections."""

from __future__ import annotations

import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from threading import Event, Lock, Thread

READ_BYTES = 65_536
SLOW_CHUNK_BYTES = 512  # that pass a slow connection at once
CONNECT_S = 2.0
RESET = struct.pack("ii", 1, 0)  # SO_LINGER of no time: the other end hears a reset instead of an end


@dataclass(eq=False)
class Passing:
    """One connection that is being passed on: from its first end to its second, and back."""

    ends: tuple[socket.socket, socket.socket]
    ways: tuple[Event, Event] = field(default_factory=lambda: (Event(), Event()))  # which of them flow
    pause_s: float = 0.0  # after each piece

    def __post_init__(self) -> None:
        self.flow()

    def flow(self) -> None:
        """Let everything pass at once from now on."""
        self.pause_s = 0.0
        for way in self.ways:
            way.set()

    def cut(self, *, reset: bool) -> None:
        """End it at both ends."""
        for end in self.ends:
            with suppress(OSError):
                if reset:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                end.shutdown(socket.SHUT_RDWR)
        self.flow()


class FaultProxy:
    """Listens on a port of its own, and passes every connection on to another port."""

    def __init__(self, to: int) -> None:
        self.to = to
        self._refuses_until = 0.0
        self._passing: list[Passing] = []
        self._lock = Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        Thread(target=self._accept, daemon=True).start()

    def cut(self, chance: Random, *, reset: bool) -> bool:
        """End one connection; return whether there was one."""
        one = self._one(chance)
        if one is not None:
            one.cut(reset=reset)
        return one is not None

    def hold(self, chance: Random, *, one_way: bool = False) -> Passing | None:
        """Let no byte of one connection pass, or none that goes one way, until it is to `flow` again."""
        one = self._one(chance)
        if one is not None:
            for way in [chance.choice(one.ways)] if one_way else one.ways:
                way.clear()
        return one

    def slow(self, chance: Random, pause_s: float) -> Passing | None:
        """Pass one connection's bytes on in small pieces, each after a pause, until it is to `flow` again."""
        one = self._one(chance)
        if one is not None:
            one.pause_s = pause_s
        return one

    def refuse(self, for_s: float) -> None:
        """End every connection, and each that comes for so long."""
        self._refuses_until = time.monotonic() + for_s
        with self._lock:
            everyone = list(self._passing)
        for each in everyone:
            each.cut(reset=False)

    def heal(self) -> None:
        """Let everything pass again."""
        self._refuses_until = 0.0
        with self._lock:
            for each in self._passing:
                each.flow()

    def close(self) -> None:
        """Listen no more, and end what passes."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.refuse(0.0)

    def _one(self, chance: Random) -> Passing | None:
        with self._lock:
            return chance.choice(self._passing) if self._passing else None

    def _accept(self) -> None:
        while True:
            try:
                came, _ = self._listener.accept()
            except OSError:
                return
            Thread(target=self._pass, args=(came,), daemon=True).start()

    def _pass(self, came: socket.socket) -> None:
        try:
            if time.monotonic() < self._refuses_until:
                return
            with socket.create_connection(("127.0.0.1", self.to), CONNECT_S) as there:
                there.settimeout(None)
                for end in (came, there):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._both_ways(Passing((came, there)))
        except OSError:
            pass  # nobody listens there now: whoever came finds its connection ended
        finally:
            came.close()

    def _both_ways(self, one: Passing) -> None:
        came, there = one.ends
        with self._lock:
            self._passing.append(one)
        back = Thread(target=self._one_way, args=(one, one.ways[1], there, came), daemon=True)
        try:
            back.start()
            self._one_way(one, one.ways[0], came, there)
            back.join()
        finally:
            with self._lock:
                self._passing.remove(one)

    @staticmethod
    def _one_way(one: Passing, way: Event, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(SLOW_CHUNK_BYTES if one.pause_s else READ_BYTES):
                time.sleep(one.pause_s)
                way.wait()
                sink.sendall(data)
        way.wait()
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
