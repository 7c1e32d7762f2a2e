"""The Unix socket at which a node is asked by its own user, whether it listens for other nodes or not.

It stands in the node's run folder, which nobody else may enter; the kernel says who has connected, so no secret
crosses. Beside it stands what the node is, so that a command finds it by the file that describes the cluster.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import trio
from attrs import frozen

from protocol.errors import PeerLost, PeerViolation
from protocol.peer import Peer
from supervisor.engine import SocketTransport
from supervisor.folders import LOCK, PREFIX
from supervisor.heart import Heart
from supervisor.link import Link, Serves

log = logging.getLogger(__name__)

SOCKET = "control"
ABOUT = "node.json"
ABOUT_BYTES_MAX = 16 * 1024
OPERATORS_MAX = 16  # at a time; others wait. A constant: all of them are this node's own user
STREAMS_MAX = 4
BACKLOG = 16
CREDENTIALS = struct.Struct("3i")  # process, user, group


@frozen
class RunningNode:
    """A node of this host, as its run folder describes it."""

    file: str
    node: str
    pid: int
    folder: str


def find(base: Path, file: Path) -> list[RunningNode]:
    """Return the nodes of a cluster's file that run below `base` and that this user may ask."""
    wanted, found = str(file.resolve()), []
    for folder in sorted(base.glob(f"{PREFIX}*")):
        with suppress(OSError, msgspec.DecodeError):  # it ends at this moment, or is no node's
            if not _is_private(folder.lstat()) or not _is_held(folder):
                continue
            with (folder / ABOUT).open("rb") as about:
                node = msgspec.json.decode(about.read(ABOUT_BYTES_MAX), type=RunningNode)
            if node.file == wanted and node.folder == str(folder):
                found.append(node)
    return found


def _is_private(status: os.stat_result) -> bool:
    owned = os.geteuid() in {0, status.st_uid}
    return stat.S_ISDIR(status.st_mode) and owned and not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)


def _is_held(folder: Path) -> bool:
    """Whether the node of a folder lives: it holds the lock."""
    lock = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


@contextmanager
def address(folder: Path) -> Iterator[str]:
    """Yield a short way to the socket of a folder: a socket's address holds no more than 107 bytes."""
    opened = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{opened}/{SOCKET}"
    finally:
        os.close(opened)


async def serve(folder: Path, file: Path, node: str, serves: Serves, heart: Heart) -> None:
    """Answer operators until cancelled; a node that cannot be asked this way says so in its log, and runs on."""
    try:
        listener = _listener(folder)
        _describe(folder, file, node)
    except OSError as error:
        log.warning("operators cannot ask this node by its socket", extra={"reason": str(error)})
        return
    room = trio.CapacityLimiter(OPERATORS_MAX)

    async def attend(stream: trio.SocketStream) -> None:
        if _may_ask(stream):
            async with room:
                await _attend(stream, node, serves, heart)

    await trio.serve_listeners(attend, [trio.SocketListener(listener)])


def _describe(folder: Path, file: Path, node: str) -> None:
    about = RunningNode(str(file.resolve()), node, os.getpid(), str(folder))
    (folder / ABOUT).write_bytes(msgspec.json.encode(about))


def _listener(folder: Path) -> trio.socket.SocketType:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with address(folder) as where:
            made.bind(where)
        made.listen(BACKLOG)
    except OSError:
        made.close()
        raise
    return trio.socket.from_stdlib_socket(made)


def _may_ask(stream: trio.SocketStream) -> bool:
    told = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    _, user, _ = CREDENTIALS.unpack(told)
    return user in {0, os.geteuid()}


async def _attend(stream: trio.SocketStream, node: str, serves: Serves, heart: Heart) -> None:
    """Answer one operator until it leaves."""
    link = Link(SocketTransport(stream), Peer(node, serves_max=STREAMS_MAX), serves, heart=heart)
    try:
        await link.run()
    except PeerLost:
        pass  # it has what it asked for
    except PeerViolation as error:
        log.warning("an operator broke the protocol", extra={"reason": str(error)})
    except Exception:
        log.exception("a bug ended an operator's link")
    finally:
        await trio.aclose_forcefully(stream)
