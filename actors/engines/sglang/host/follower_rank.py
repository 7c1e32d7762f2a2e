"""What is peculiar to the hosts of an engine that spans several: a core of its own, and a rank that nobody asks."""

from __future__ import annotations

import os
import signal
import socket

from actors.engines.sglang.host.watchdog import Watchdog
from protocol.frames import Bye
from protocol.peer import Peer

READ_BYTES = 4096


def pin_to_core(rank: int) -> None:
    """Give this rank's scheduler a core that no other rank of the same engine has, unless its operator has chosen."""
    cores = sorted(os.sched_getaffinity(0))
    os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", str(cores[rank % len(cores)]))


def serve_follower_rank(peer: Peer, link: socket.socket, guard: Watchdog) -> str:
    """Be a rank that is not the first: say Hello, wait until the node says Bye, and return its reason."""
    for sign in (signal.SIGTERM, signal.SIGQUIT):
        signal.signal(sign, lambda number, _: guard.end(signal.Signals(number).name))
    link.sendall(peer.take())  # Hello: this rank has met the others
    while data := link.recv(READ_BYTES):
        for frame in peer.receive(data):
            if isinstance(frame, Bye):
                return frame.detail
    return guard.end("the link to the node is closed")
