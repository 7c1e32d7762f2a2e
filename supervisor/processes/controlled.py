"""Processes that their node controls by a socket: templates and zygotes, which fork the processes that do the work."""

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
    """A process that has been started, the control socket to it, and what it prints; whoever has it closes these."""

    process: Process
    control: trio.socket.SocketType
    output: trio.lowlevel.FdStream


def start_controlled(
    name: str, command: Sequence[str], environment: dict[str, str], output_log: OutputLog
) -> Controlled:
    """Start a process, whose last arguments are the descriptor of its control socket and the id of this process.

    The socket keeps packets apart. To be called from the main thread, as `start` is. Raises `OSError`, and leaves
    nothing open then.
    """
    with ExitStack() as stack:  # closes what was opened, if a later step fails
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
