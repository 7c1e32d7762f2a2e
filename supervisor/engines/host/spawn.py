"""The start of a host as a new process, and the descriptors that it inherits.

A host inherits four descriptors and nothing else of the node, so that it depends on no parent.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import trio
from attrs import frozen

import actors
from supervisor.processes.process import Process, start
from supervisor.processes.run_folder import RunFolder

ROOT = Path(actors.__file__).parent.parent


@frozen
class Descriptors:
    """The descriptors that a host inherits: its link, the node's pidfd, its log, the lock of the node's folder."""

    link: int
    node: int
    log: int
    lock: int

    def __iter__(self) -> Iterator[int]:
        return iter((self.link, self.node, self.log, self.lock))


async def spawn_host(
    name: str, command: Sequence[str], boot: str, environment: dict[str, str], descriptors: Descriptors
) -> Process:
    """Start a host by its command, with its link, its node, its log and its boot message as arguments.

    Any user of this machine can read a command line. The caller closes the descriptors.
    """
    await trio.lowlevel.checkpoint()
    numbers = [str(fd) for fd in (descriptors.link, descriptors.node, descriptors.log)]
    return start(name, [*command, *numbers, boot], environment, list(descriptors), descriptors.log)


@contextmanager
def host_descriptors(folder: RunFolder, log: int) -> Iterator[tuple[socket.socket, Descriptors]]:
    """Yield this node's end of a new link, and the descriptors that a host inherits; the body's end closes those."""
    with ExitStack() as stack:
        stack.callback(os.close, log)
        ours, theirs = socket.socketpair()
        stack.callback(theirs.close)
        try:
            node = os.pidfd_open(os.getpid())
        except OSError:
            ours.close()
            raise
        stack.callback(os.close, node)
        yield ours, Descriptors(theirs.fileno(), node, log, folder.lock)
