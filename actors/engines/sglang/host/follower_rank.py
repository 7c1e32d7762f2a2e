"""The host of a rank other than 0, which receives no requests, and the pinning of ranks to CPU cores."""

from __future__ import annotations

import os
import signal
import socket

from actors.engines.host.watchdog import Watchdog
from protocol.link.frames import Bye
from protocol.link.peer import Peer

READ_BYTES = 4096


def pin_to_cores(first: int, count: int = 1) -> None:
    """Pin the schedulers of `count` ranks, from `first` on, to a core each, unless the operator has chosen some.

    No other rank of the engine has that core, as long as there are enough.
    """
    cores = sorted(os.sched_getaffinity(0))
    pinned = "|".join(str(cores[rank % len(cores)]) for rank in range(first, first + count))
    os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", pinned)


def serve_follower_rank(peer: Peer, link: socket.socket, watchdog: Watchdog) -> str:
    """Run a rank other than 0: send Hello, wait for the node's Bye, and return its reason."""
    for handled in (signal.SIGTERM, signal.SIGQUIT):
        signal.signal(handled, lambda number, _: watchdog.end(signal.Signals(number).name))
    link.sendall(peer.data_to_send())  # Hello: this rank has met the others
    while data := link.recv(READ_BYTES):
        for frame in peer.receive_data(data):
            if isinstance(frame, Bye):
                return frame.detail
    return watchdog.end("the link to the node is closed")
