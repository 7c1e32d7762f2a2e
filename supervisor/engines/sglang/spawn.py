"""The start of hosts: forked from a zygote on a CPU, spawned with CUDA, which cannot be forked.

A dead zygote is started again in the background, and only a start that needs it waits. A host inherits four descriptors
and nothing else of the node, so that it depends on no parent.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Protocol

import trio
from attrs import define, evolve

from actors.engines.sglang import boot_message
from protocol.errors import EngineDied, StartFailed
from supervisor.engines.host.spawn import ROOT, Descriptors, spawn_host
from supervisor.engines.sglang.section import OWN_ZYGOTE_PREFIX, SHARED_ZYGOTE, SglangSection
from supervisor.processes.controlled import start_controlled
from supervisor.processes.output_log import OutputLog
from supervisor.processes.process import GracePeriods, Ladder, Process
from supervisor.supervision.registration import Registration

HOST_FOLDER = ROOT / "actors" / "engines" / "sglang" / "host"
CPU_PATH, PLUGIN_PATH = HOST_FOLDER / "cpu", HOST_FOLDER / "plugin"  # for the PYTHONPATH of hosts
ZYGOTE_COMMAND = (sys.executable, "-m", "actors.engines.sglang.host.zygote")
HOST_COMMAND = (sys.executable, "-m", "actors.engines.sglang.host")
ANSWER_BYTES = 512
FORK_WITHIN_S = 5.0


class HostStarter(Protocol):
    """Starts hosts."""

    async def __call__(self, boot: boot_message.BootMessage, descriptors: Descriptors) -> Process:
        """Start a host; the caller closes the descriptors."""


@define(eq=False)
class Zygote:
    """A zygote that can fork, by its control socket."""

    control: trio.socket.SocketType
    busy: trio.Lock
    scope: trio.CancelScope  # around its use: cancelled when it does not answer, so that it is ended

    async def fork(self, boot: boot_message.BootMessage, descriptors: Descriptors) -> Process:
        """Fork a host; raises `EngineDied` if the zygote is gone or does not answer, `StartFailed` if it cannot.

        Raises `OSError` if this process has no descriptor to watch it by.
        """
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _packed(descriptors))]
        answer, ancillary = b"", list[tuple[int, int, bytes]]()
        async with self.busy:
            # Shielded: after a request whose reply is not read, the next request would get that reply.
            with trio.move_on_after(FORK_WITHIN_S, shield=True), suppress(OSError, trio.ClosedResourceError):
                await self.control.sendmsg([boot_message.encode(boot)], rights)
                answer, ancillary, _, _ = await self.control.recvmsg(ANSWER_BYTES, socket.CMSG_SPACE(4))
        if not answer:
            self.scope.cancel(reason="it does not answer")
            raise EngineDied("the zygote did not fork a host")
        if not answer.isdigit():
            raise StartFailed(f"the zygote could not fork a host: {answer.decode(errors='replace')}")
        if not ancillary:
            os.kill(int(answer), signal.SIGKILL)  # not reaped yet, so no other process has its id
            self.release(int(answer))
            raise OSError(errno.EMFILE, "no descriptor is left to watch a host by")
        pidfd = int.from_bytes(ancillary[0][2][:4], sys.byteorder)
        return Process(boot.name, int(answer), pidfd, release=partial(self.release, int(answer)))

    def release(self, pid: int) -> None:
        """Let the zygote reap a host that the node no longer watches."""
        with suppress(OSError):  # it has died, and the host's new parent reaps it
            os.write(self.control.fileno(), str(pid).encode())


def _packed(descriptors: Descriptors) -> bytes:
    return b"".join(fd.to_bytes(4, sys.byteorder) for fd in descriptors)


async def zygote(
    registration: Registration[Zygote],
    output_log: OutputLog,
    grace: GracePeriods,
    ladder: Ladder,
    environment: Mapping[str, str],
    command: tuple[str, ...] = ZYGOTE_COMMAND,
    own: Mapping[str, str] | None = None,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run one zygote; `started()` means that it can fork. `own` are the variables of the one engine that it is for.

    Raises `StartFailed` if it cannot import SGLang.
    """
    started = start_controlled("zygote", command, host_environment(environment, "cpu", own), output_log)
    control, ready = started.control, False
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(output_log.copy_from, started.output)
            if ready := bool(await _received(control)):
                task_status.started()
                with trio.CancelScope() as scope, registration.publish(Zygote(control, trio.Lock(), scope)):
                    await started.process.wait()
            nursery.cancel_scope.cancel(reason="the zygote has ended")
    finally:
        control.close()
        await started.process.stop(ladder, grace)  # noqa: ASYNC102  # shielded, rung by rung
    end = started.process.end
    if ready:
        raise EngineDied(f"the zygote died: {end}" if end else "the zygote died")
    raise StartFailed(f"the zygote could not import SGLang: {output_log.reason(end)}")


async def _received(control: trio.socket.SocketType) -> bytes:
    try:
        return await control.recv(ANSWER_BYTES)
    except OSError:
        return b""


def zygote_name(name: str, section: SglangSection) -> str | None:
    """Return the name of the zygote that forks an engine's host, None if none does."""
    if section.device != "cpu":
        return None
    return f"{OWN_ZYGOTE_PREFIX}{name}" if section.environment else SHARED_ZYGOTE


def fork_starter(registration: Registration[Zygote]) -> HostStarter:
    """Return a starter that forks hosts from the registered zygote, or waits for the next one.

    It raises `StartFailed`, with the zygote's sentence, if that could not start.
    """

    async def fork(boot: boot_message.BootMessage, descriptors: Descriptors) -> Process:
        return await (await registration.wait_started()).fork(boot, descriptors)

    return fork


def spawn_starter(environment: Mapping[str, str], device: str, command: tuple[str, ...] = HOST_COMMAND) -> HostStarter:
    """Return what starts each host as a new process."""

    async def spawn(boot: boot_message.BootMessage, descriptors: Descriptors) -> Process:
        # The operator's variables may be secrets, and any user of this machine can read a command line.
        own = host_environment(environment, device, boot.environment)
        text = boot_message.encode(evolve(boot, environment={})).decode()
        return await spawn_host(boot.name, command, text, own, descriptors)

    return spawn


def host_environment(
    environment: Mapping[str, str], device: str, own: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment of a host or a zygote: the node's, then what `device` needs, then the engine's own.

    Models' files are in UTF-8 whatever the locale of the machine is, and SGLang opens some by the encoding of that.
    """
    path = [
        str(ROOT),
        str(PLUGIN_PATH),
        *([str(CPU_PATH)] if device == "cpu" else []),
        environment.get("PYTHONPATH", ""),
    ]
    needed = {**boot_message.environment(device), "PYTHONPATH": os.pathsep.join(filter(None, path))}
    return {"PYTHONUTF8": "1", **environment, **needed, **(own or {})}
