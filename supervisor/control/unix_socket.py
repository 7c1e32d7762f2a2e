"""The Unix socket for control requests of a node's own user, whether the node listens for other nodes or not.

It stands in the node's run folder, which nobody else may enter; the kernel says who has connected, so no secret
crosses. Beside it stands what the node is, so that a command finds it by the file that describes the cluster.
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
from protocol.peer import Peer
from supervisor.engines.sglang.engine import SocketTransport
from supervisor.links.heartbeat import Heartbeat
from supervisor.links.link import Link
from supervisor.links.serving import Services
from supervisor.processes.run_folder import LOCK, PREFIX, RunFolder
from supervisor.threads.text_threads import NO_THREAD

log = logging.getLogger(__name__)

T = TypeVar("T")

SOCKET = "control"
DESCRIPTION = "node.json"
DESCRIPTION_BYTES_MAX = 16 * 1024
OPERATORS_MAX = 16  # at a time; others wait. A constant: all of them are this node's own user
STREAMS_MAX = 4
BACKLOG = 16
CHECK_S = 3.0  # between two checks that both are still in the folder
CREDENTIALS = struct.Struct("3i")  # process, user, group


@frozen
class RunningNode:
    """A node of this host, as its run folder describes it."""

    file: str
    node: str
    pid: int
    folder: str


def running_nodes(base: Path, file: Path) -> list[RunningNode]:
    """Return the nodes of a cluster's file that run below `base` and that this user may ask."""
    wanted, nodes = str(file.resolve()), []
    for folder in sorted(base.glob(f"{PREFIX}*")):
        with suppress(OSError, msgspec.DecodeError):  # it ends at this moment, or is not a node's
            if not _is_private(folder.lstat()) or not _is_held(folder):
                continue
            with (folder / DESCRIPTION).open("rb") as file_:
                node = msgspec.json.decode(file_.read(DESCRIPTION_BYTES_MAX), type=RunningNode)
            if node.file == wanted and node.folder == str(folder):
                nodes.append(node)
    return nodes


def _is_private(status: os.stat_result) -> bool:
    owned = os.geteuid() in {0, status.st_uid}
    return stat.S_ISDIR(status.st_mode) and owned and not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)


def _is_held(folder: Path) -> bool:
    """Whether the node of a folder is alive: it holds the lock."""
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
    """Yield a short path to the socket of a folder: a socket's address holds no more than 107 bytes."""
    with _opened(folder) as within:
        yield _address(within)


def _address(within: int) -> str:
    return f"/proc/self/fd/{within}/{SOCKET}"


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """Open a folder, following no link to it; raises `OSError`."""
    opened = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield opened
    finally:
        os.close(opened)


@define(eq=False)
class _ControlSocket:
    """The socket and the description of a node in its run folder, and the identity of both files."""

    folder: RunFolder
    about: bytes
    _made: dict[str, os.stat_result] = field(factory=dict)

    def is_intact(self) -> bool:
        """Whether both are the files that were made, in an intact folder; raises `OSError` if that cannot be known."""
        if not self.folder.is_intact:
            return False
        try:
            return all(samestat((self.folder.path / name).lstat(), made) for name, made in self._made.items())
        except (FileNotFoundError, NotADirectoryError):
            return False

    def make(self) -> socket.socket:
        """Make both, replacing what has their names, and the folder if it has gone too; raises `OSError`."""
        self.folder.restore()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _opened(self.folder.path) as within:
                for name in (SOCKET, DESCRIPTION):
                    with suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=within)
                listener.bind(_address(within))
                listener.listen(BACKLOG)
                made = os.open(DESCRIPTION, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=within)
                with os.fdopen(made, "wb") as about:
                    about.write(self.about)
                self._made = {
                    name: os.stat(name, dir_fd=within, follow_symlinks=False) for name in (SOCKET, DESCRIPTION)
                }
        except OSError:
            listener.close()
            raise
        return listener


async def serve(
    folder: RunFolder, file: Path, node: str, serves: Services, heart: Heartbeat, *, check_s: float = CHECK_S
) -> None:
    """Serve control requests until cancelled; a node whose socket cannot be made logs that, and runs on.

    What cleans /tmp may remove the socket of a node that runs for weeks: it is made anew.
    """
    control_socket = _ControlSocket(folder, _description(folder.path, file, node))
    room = trio.CapacityLimiter(OPERATORS_MAX)

    async def serve_one(stream: trio.SocketStream) -> None:
        if _is_allowed(stream):
            async with room:
                await _serve_one(stream, node, serves, heart)

    async with trio.open_nursery() as operators:
        was_made, failed = False, ""
        while True:
            try:
                listener = await _in_thread(control_socket.make, abandons=False)
            except OSError as error:
                if failed != str(error):
                    failed = str(error)
                    log.warning("operators cannot ask this node by its socket", extra={"reason": failed})
                await trio.sleep(check_s)
                continue
            if was_made:
                log.warning("made the socket for operators anew: it was gone", extra={"folder": str(folder.path)})
            was_made, failed = True, ""
            async with trio.open_nursery() as nursery:
                listeners = [trio.SocketListener(trio.socket.from_stdlib_socket(listener))]
                nursery.start_soon(partial(trio.serve_listeners, serve_one, listeners, handler_nursery=operators))
                await _wait_gone(control_socket, check_s)
                nursery.cancel_scope.cancel(reason="nobody finds this socket any more")


async def _wait_gone(control_socket: _ControlSocket, check_s: float) -> None:
    """Wait until the node can no longer be found by its run folder."""
    while True:
        await trio.sleep(check_s)
        with suppress(OSError):  # it cannot be known at this moment
            if not await _in_thread(control_socket.is_intact, abandons=True):
                return


async def _in_thread(function: Callable[[], T], *, abandons: bool) -> T:
    """Run a function in a thread, since a disk may not answer. Raises `OSError`, also if there is no thread.

    What makes files is not abandoned: it would make them after this node has removed them.
    """
    try:
        return await trio.to_thread.run_sync(function, abandon_on_cancel=abandons)
    except RuntimeError as error:
        if str(error) == NO_THREAD:
            raise OSError(errno.EAGAIN, NO_THREAD) from error
        raise


def _description(folder: Path, file: Path, node: str) -> bytes:
    return msgspec.json.encode(RunningNode(str(file.resolve()), node, os.getpid(), str(folder)))


def _is_allowed(stream: trio.SocketStream) -> bool:
    told = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    _, user, _ = CREDENTIALS.unpack(told)
    return user in {0, os.geteuid()}


async def _serve_one(stream: trio.SocketStream, node: str, serves: Services, heart: Heartbeat) -> None:
    """Serve one connection until it ends."""
    link = Link(SocketTransport(stream), Peer(node, serves_max=STREAMS_MAX), serves, heartbeat=heart)
    try:
        await link.run()
    except PeerLost:
        pass  # it has its answer
    except PeerViolation as error:
        log.warning("an operator broke the protocol", extra={"reason": str(error)})
    except Exception:
        log.exception("a bug ended an operator's link")
    finally:
        await trio.aclose_forcefully(stream)
