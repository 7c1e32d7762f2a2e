"""The end of a host whose engine could not start."""

from __future__ import annotations

import socket
from typing import NoReturn

from actors.engines.host.watchdog import Watchdog
from actors.engines.host_ends import START_FAILED
from protocol.link.frames import Bye
from protocol.link.peer import Peer


def fail_start(
    name: str, link: socket.socket, watchdog: Watchdog, error: BaseException, what: str = "the engine could not start"
) -> NoReturn:
    """End the host of the engine with that name, with the reason for its node and for its log."""
    peer = Peer(name, serves_max=0)
    peer.send(Bye(START_FAILED, f"{type(error).__name__}: {error}"))
    link.sendall(peer.data_to_send())
    watchdog.end(f"{what}: {error!r}")
