"""The template of the decoders as a child of the tree: a process that forks one process for each job.

The process has imported the parsers, so a decoder starts in a few milliseconds. It never reads a content itself. If it
dies all the same, its jobs end, and it is started again after a while.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import trio
from attrs import define, field

import actors
from actors.media import jobs
from protocol.errors import EngineDied, StartFailed
from supervisor.processes.controlled import start_controlled
from supervisor.processes.output_log import OutputLog
from supervisor.processes.process import GracePeriods, Ladder
from supervisor.supervision.registration import Registration

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "actors.media.decoder")
LADDER = Ladder(stop_s=0.5, term_s=0.5, kill_s=1.0)
READY_WITHIN_S = 20.0
LAST_OUTPUT_S = 0.5
WITHOUT_FILTER = 'set sandbox = "preferred" in [gateway.media] to decode without it'
ROOT = Path(actors.__file__).parent.parent
KEPT_VARIABLES = ("LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@define(eq=False)
class DecoderTemplate:
    """A ready template, by its control socket."""

    control: trio.socket.SocketType
    _sending: trio.Lock = field(factory=trio.Lock)  # two tasks may not wait for room in one socket

    @asynccontextmanager
    async def job(self, job: jobs.Job, content: int) -> AsyncIterator[trio.socket.SocketType]:
        """Begin a job on the content in a descriptor; yields the socket of its answers. Leaving kills its process.

        Waits while the template does not read. Raises `OSError` without a descriptor left, or after the template's end.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        answers = trio.socket.from_stdlib_socket(ours)
        try:
            with theirs:
                rights = b"".join(fd.to_bytes(4, sys.byteorder) for fd in (theirs.fileno(), content))
                packet = jobs.encode(job)
                if len(packet) > jobs.PACKET_BYTES_MAX:
                    raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
                await self._send(packet, rights)
            yield answers
        finally:
            answers.close()  # the template kills the job's process now

    async def _send(self, packet: bytes, rights: bytes) -> None:
        async with self._sending:
            try:
                await self.control.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            except trio.ClosedResourceError as error:  # it died while this waited
                raise OSError(errno.EPIPE, os.strerror(errno.EPIPE)) from error


def decoder_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the template: only the variables that Python needs to find its modules."""
    kept = {name: environment[name] for name in KEPT_VARIABLES if name in environment}
    path = [str(ROOT), *filter(None, [kept.get("PYTHONPATH", "")])]
    return {**ONE_THREAD, **kept, "PYTHONPATH": os.pathsep.join(path)}


async def decoder_template(
    registration: Registration[DecoderTemplate],
    output_log: OutputLog,
    grace: GracePeriods,
    environment: Mapping[str, str],
    command: tuple[str, ...] = COMMAND,
    *,
    filter_required: bool = True,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run the template and publish it while it lives; `started()` is called at once, since no other child waits for it.

    Raises `StartFailed` if it does not become ready, or lacks a required filter of system calls on this machine,
    `EngineDied` if it ends later.
    """
    started = start_controlled("media decoders", command, decoder_environment(environment), output_log)
    task_status.started()
    control = started.control
    ready, gap, copied = False, "", trio.Event()

    async def copy_output() -> None:
        await output_log.copy_from(started.output)
        copied.set()

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(copy_output)
            message = await _first_message(control)
            gap = message.removeprefix(jobs.READY).decode(errors="replace")
            if gap and not filter_required:
                log.warning("the sandbox of the media decoders is weaker than it could be: %s", gap)
            if ready := message.startswith(jobs.READY) and not (gap and filter_required):
                with registration.publish(DecoderTemplate(control)):
                    await started.process.wait()
            with trio.move_on_after(LAST_OUTPUT_S):  # its last line has the reason of its end
                await copied.wait()
            nursery.cancel_scope.cancel(reason="the decoders have ended")
    finally:
        control.close()
        await started.process.stop(LADDER, grace)  # noqa: ASYNC102  # shielded, rung by rung
    end = started.process.end
    if ready:
        raise EngineDied(f"the template of the media decoders died{f': {end}' if end else ''}")
    if gap:
        raise StartFailed(f"the media decoders have no sandbox on this host: {gap}; {WITHOUT_FILTER}")
    raise StartFailed(f"the media decoders could not start: {output_log.reason(end)}")


async def _first_message(control: trio.socket.SocketType) -> bytes:
    """Return the message of a template that is ready, with a gap of its sandbox; empty if none comes."""
    with trio.move_on_after(READY_WITHIN_S), suppress(OSError):
        return await control.recv(jobs.PACKET_BYTES_MAX)
    return b""
