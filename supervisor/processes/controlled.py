"""Processes controlled by their node over a socket: templates and zygotes, which fork worker processes."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack

import trio
from attrs import frozen

from supervisor.processes.output_log import OutputLog
from supervisor.processes.process import Process, start


@frozen
class Controlled:
    """A started process, its control socket, and the stream of its output; the owner closes both."""

    process: Process
    control: trio.socket.SocketType
    output: trio.lowlevel.FdStream


def start_controlled(
    name: str, command: Sequence[str], environment: dict[str, str], output_log: OutputLog
) -> Controlled:
    """Start a process; its last arguments are the descriptor of its control socket and the id of this process.

    The socket keeps packets apart. To be called from the main thread, as `start` is. Raises `OSError`, and leaves
    nothing open then.
    """
    with ExitStack() as stack:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stack.callback(theirs.close)
        failed = stack.enter_context(ExitStack())
        failed.callback(ours.close)
        output, write = output_log.pipe()
        stack.callback(os.close, write)
        failed.callback(output.close)
        arguments = [*command, str(theirs.fileno()), str(os.getpid())]
        process = start(name, arguments, environment, [theirs.fileno()], write)
        failed.pop_all()
    return Controlled(process, trio.socket.from_stdlib_socket(ours), output)
