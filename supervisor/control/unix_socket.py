"""The Unix socket for control requests of a node's own user, whether the node listens for other nodes or not.

It is in the node's run folder, which no other user may enter, and the kernel reports the peer's user, so no secret is
exchanged. A description beside it names the file of the cluster, so that a command finds the node.

A node without its socket serves its clients all the same; and since cleaners of `/tmp` delete files after weeks, the
socket is checked regularly, and made again when it is gone.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from os.path import samestat
from pathlib import Path
from typing import TypeVar

import msgspec
import trio
from attrs import define, field, frozen

from protocol.errors import PeerLost, PeerViolation
from protocol.link.peer import Peer
from supervisor.links.heartbeat import Heartbeat
from supervisor.links.link import Link
from supervisor.links.serving import Services
from supervisor.links.transport import SocketTransport
from supervisor.processes.run_folder import LOCK, PREFIX, RunFolder
from supervisor.threads.text_threads import NO_THREAD

log = logging.getLogger(__name__)

T = TypeVar("T")

SOCKET = "control"
DESCRIPTION = "node.json"
DESCRIPTION_BYTES_MAX = 16 * 1024
OPERATORS_MAX = 16  # connections; further ones wait. A constant, since all are of this node's own user
STREAMS_MAX = 4
BACKLOG = 16
CHECK_S = 3.0  # the time between two checks of the socket and the description
CREDENTIALS = struct.Struct("3i")  # a peer's process, user and group


@frozen
class RunningNode:
    """The description of a running node in its run folder."""

    file: str
    node: str
    pid: int
    folder: str


def running_nodes(base: Path, file: Path) -> list[RunningNode]:
    """Return the running nodes of a cluster's file with run folders of this user below `base`."""
    path, nodes = str(file.resolve()), []
    for folder in sorted(base.glob(f"{PREFIX}*")):
        with suppress(OSError, msgspec.DecodeError):  # the node is ending, or the folder is no node's
            if not _is_private(folder.lstat()) or not _is_held(folder):
                continue
            with (folder / DESCRIPTION).open("rb") as file_:
                node = msgspec.json.decode(file_.read(DESCRIPTION_BYTES_MAX), type=RunningNode)
            if node.file == path and node.folder == str(folder):
                nodes.append(node)
    return nodes


def _is_private(status: os.stat_result) -> bool:
    owned = os.geteuid() in {0, status.st_uid}
    return stat.S_ISDIR(status.st_mode) and owned and not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)


def _is_held(folder: Path) -> bool:
    """Whether the node of a folder is alive and so holds the lock."""
    lock = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


@contextmanager
def socket_address(folder: Path) -> Iterator[str]:
    """Yield a short path to the socket of a folder, since a socket address has at most 107 bytes."""
    with _opened(folder) as folder_fd:
        yield _address(folder_fd)


def _address(folder_fd: int) -> str:
    return f"/proc/self/fd/{folder_fd}/{SOCKET}"


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """Yield a descriptor of a folder, which may be no symbolic link; raises `OSError`."""
    folder_fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield folder_fd
    finally:
        os.close(folder_fd)


@define(eq=False)
class ControlSocket:
    """The socket and the description of a node in its run folder, and the identity of both files."""

    folder: RunFolder
    description: bytes
    _identities: dict[str, os.stat_result] = field(factory=dict)

    def is_intact(self) -> bool:
        """Whether both files are the original ones, in an intact folder; raises `OSError` if that is unknown."""
        if not self.folder.is_intact:
            return False
        try:
            return all(
                samestat((self.folder.path / name).lstat(), identity) for name, identity in self._identities.items()
            )
        except (FileNotFoundError, NotADirectoryError):
            return False

    def make(self) -> socket.socket:
        """Make both files, replacing others of these names, and the folder if it is gone too; raises `OSError`."""
        self.folder.restore()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _opened(self.folder.path) as folder_fd:
                for name in (SOCKET, DESCRIPTION):
                    with suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=folder_fd)
                listener.bind(_address(folder_fd))
                listener.listen(BACKLOG)
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                with os.fdopen(os.open(DESCRIPTION, flags, 0o600, dir_fd=folder_fd), "wb") as description:
                    description.write(self.description)
                self._identities = {
                    name: os.stat(name, dir_fd=folder_fd, follow_symlinks=False) for name in (SOCKET, DESCRIPTION)
                }
        except OSError:
            listener.close()
            raise
        return listener


async def serve(
    folder: RunFolder, file: Path, node: str, services: Services, heartbeat: Heartbeat, *, check_s: float = CHECK_S
) -> None:
    """Serve control requests until cancelled; a missing socket is made again."""
    control_socket = ControlSocket(folder, _description(folder.path, file, node))
    operators_max = trio.CapacityLimiter(OPERATORS_MAX)

    async def serve_one(stream: trio.SocketStream) -> None:
        if _is_allowed(stream):
            async with operators_max:
                await _serve_connection(stream, node, services, heartbeat)

    async with trio.open_nursery() as operators:
        was_made, failure = False, ""
        while True:
            try:
                listener = await _in_thread(control_socket.make, abandon=False)
            except OSError as error:
                if failure != str(error):  # logged once, not at each attempt
                    failure = str(error)
                    log.warning("operators cannot ask this node by its socket", extra={"reason": failure})
                await trio.sleep(check_s)
                continue
            if was_made:
                log.warning("made the socket for operators anew: it was gone", extra={"folder": str(folder.path)})
            was_made, failure = True, ""
            async with trio.open_nursery() as nursery:
                listeners = [trio.SocketListener(trio.socket.from_stdlib_socket(listener))]
                nursery.start_soon(partial(trio.serve_listeners, serve_one, listeners, handler_nursery=operators))
                await _wait_gone(control_socket, check_s)
                nursery.cancel_scope.cancel(reason="the socket is gone from its folder")


async def _wait_gone(control_socket: ControlSocket, check_s: float) -> None:
    """Wait until commands can no longer find the node by its run folder."""
    while True:
        await trio.sleep(check_s)
        with suppress(OSError):  # unknown at this moment
            if not await _in_thread(control_socket.is_intact, abandon=True):
                return


async def _in_thread(function: Callable[[], T], *, abandon: bool) -> T:
    """Run a function in a thread, since a disk may not answer. Raises `OSError`, also if there is no thread.

    `abandon` lets a cancelled caller leave the thread behind; never one that makes files, since it could make them
    after the node has removed its folder.
    """
    try:
        return await trio.to_thread.run_sync(function, abandon_on_cancel=abandon)
    except RuntimeError as error:
        if str(error) == NO_THREAD:
            raise OSError(errno.EAGAIN, NO_THREAD) from error
        raise


def _description(folder: Path, file: Path, node: str) -> bytes:
    return msgspec.json.encode(RunningNode(str(file.resolve()), node, os.getpid(), str(folder)))


def _is_allowed(stream: trio.SocketStream) -> bool:
    """Whether the user at the other end is root, or the user of this node."""
    credentials = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    _, user, _ = CREDENTIALS.unpack(credentials)
    return user in {0, os.geteuid()}


async def _serve_connection(stream: trio.SocketStream, node: str, services: Services, heartbeat: Heartbeat) -> None:
    """Serve one connection until it ends."""
    link = Link(SocketTransport(stream), Peer(node, serves_max=STREAMS_MAX), services, heartbeat=heartbeat)
    try:
        await link.run()
    except PeerLost:
        pass  # the command has its answer, and has left
    except PeerViolation as error:
        log.warning("an operator broke the protocol", extra={"reason": str(error)})
    except Exception:
        log.exception("a bug ended an operator's link")
    finally:
        await trio.aclose_forcefully(stream)
