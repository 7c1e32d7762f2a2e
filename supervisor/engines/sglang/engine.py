"""One engine as a child of the tree: its process, its link, and the port that it offers."""

from __future__ import annotations

import logging
import socket
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TypeAlias

import trio
from attrs import define, evolve, field, frozen

from actors.engines.port import Engine
from actors.engines.sglang import boot_message, shared_memory
from actors.engines.sglang.adapter import SglangEngine
from protocol.errors import ActorError, EngineDied, EngineLost, LocalViolation, PeerLost, PeerViolation, StartFailed
from protocol.messages import EngineInfo, GetInfo
from protocol.peer import Peer
from supervisor.engines.sglang.spawn import HostStarter, descriptors
from supervisor.links.link import Link
from supervisor.processes.output_log import OutputLog
from supervisor.processes.process import GracePeriods, Ladder, Process
from supervisor.processes.run_folder import RunFolder
from supervisor.sockets.descriptor_reserve import Reserve, is_full
from supervisor.supervision.registration import Registration

log = logging.getLogger(__name__)

READ_BYTES = 256 * 1024
LAST_LINES = 10  # of a log that is gone when the node is


@define(eq=False)
class SocketTransport:
    """A stream socket as a link's transport."""

    stream: trio.SocketStream

    async def send_all(self, data: bytes) -> None:
        """Write all of `data`."""
        await self.stream.send_all(data)

    async def receive_some(self) -> bytes | bytearray:
        """Return some bytes, none at the end."""
        return await self.stream.receive_some(READ_BYTES)


@frozen
class HostRuntime:
    """What the engines of a node share."""

    folder: RunFolder
    chatter: Callable[[str], OutputLog]
    grace: GracePeriods
    ladder: Ladder
    now: Callable[[], float]
    silent_s: float = 10.0
    reserve: Reserve = field(factory=Reserve)


Use: TypeAlias = Callable[[Link, Process], Awaitable[str | None]]
"""What is done with a host that is ready, until it has ended, or is to be ended: then it returns why."""


async def engine(
    spec: boot_message.SglangSpec,
    starts: HostStarter,
    plug: Registration[Engine],
    house: HostRuntime,
    port: int | None = None,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Keep one engine, met at `port` if it is a prefill; `started()` means that it can be asked.

    Raises `StartFailed` if it cannot become ready, `EngineDied` when its process or its link ends later.
    """

    async def offer(link: Link, process: Process) -> str | None:
        with suppress(EngineLost):
            offered = SglangEngine(link, await _info(link))
            with plug.publish(offered):
                task_status.started()
                return await _watched(offered, process, house.silent_s)
        return None

    await _host(evolve(spec, bootstrap_port=port), starts, house, offer)


async def silent(spec: boot_message.SglangSpec, starts: HostStarter, house: HostRuntime, port: int | None) -> None:
    """Keep the host of a rank that nobody asks, of an engine met at `port`; raises as `engine` does."""

    async def wait(_: Link, process: Process) -> None:
        await process.wait()

    await _host(evolve(spec, bootstrap_port=port), starts, house, wait)


async def _watched(offered: SglangEngine, process: Process, silent_s: float) -> str | None:
    """Wait for the end of an engine's process, or return why it is to be ended before."""
    why = None

    async def listen() -> None:
        nonlocal why
        with suppress(EngineLost):
            await offered.wait_silent(silent_s)
            why = f"its scheduler has neither answered nor computed for {silent_s:g} s"
            nursery.cancel_scope.cancel(reason="it is frozen")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(listen)
        await process.wait()
        nursery.cancel_scope.cancel(reason="its process has ended")
    return why


async def checker(
    spec: boot_message.SglangSpec, starts: HostStarter, plug: Registration[Link], house: HostRuntime
) -> None:
    """Keep one grammar checker, and offer the link to it; raises as `engine` does."""

    async def offer(link: Link, process: Process) -> None:
        with plug.publish(link):
            await process.wait()

    await _host(spec, starts, house, offer)


async def _host(spec: boot_message.SglangSpec, starts: HostStarter, house: HostRuntime, use: Use) -> None:
    chatter = house.chatter(spec.name)
    frozen_why: str | None = None
    with ExitStack() as stack:
        ours, output, process = await _started(spec, starts, house, chatter, stack)
        transport = SocketTransport(trio.SocketStream(trio.socket.from_stdlib_socket(ours)))
        link = Link(transport, Peer(spec.name, serves_max=0), lost_error=EngineLost)
        async with trio.open_nursery() as nursery:
            # Both end when the process has ended. Until then they outlive a cancel, because the ladder needs them.
            aside = trio.CancelScope(shield=True)
            nursery.start_soon(_carry, link, chatter, output, aside, nursery.cancel_scope)
            try:
                await link.wait_ready()
                frozen_why = await use(link, process)
            finally:
                goodbye = partial(link.send_bye, "shutdown", "the node stops it")
                # A host that still loads does not listen yet, and one that is frozen never will.
                ask = goodbye if link.ready and frozen_why is None else None
                await process.stop(house.ladder, house.grace, ask=ask)  # noqa: ASYNC102  # shielded, rung by rung
                aside.cancel()
    if frozen_why is not None:
        raise EngineDied(f"engine {spec.name} was ended: {frozen_why}")
    raise _why(link, chatter, spec.name)


_Started: TypeAlias = tuple[socket.socket, trio.lowlevel.FdStream, Process]


async def _started(
    spec: boot_message.SglangSpec, starts: HostStarter, house: HostRuntime, chatter: OutputLog, stack: ExitStack
) -> _Started:
    """Start a host in a folder of its own, with descriptors of the reserve if there are no others.

    Raises `StartFailed` for whatever the system says no to: descriptors, processes, disk space.
    """
    try:
        try:
            return await _attempt(spec, starts, house, chatter, stack)
        except OSError as error:
            if not is_full(error):
                raise
        stack.close()  # what the attempt has made
        with house.reserve.lend():
            return await _attempt(spec, starts, house, chatter, stack)
    except OSError as error:
        raise StartFailed(f"engine {spec.name} could not be started: {error.strerror or error}") from error


async def _attempt(
    spec: boot_message.SglangSpec, starts: HostStarter, house: HostRuntime, chatter: OutputLog, stack: ExitStack
) -> _Started:
    house.folder.restore()  # a node that runs for weeks below /tmp may find it gone
    place = Path(tempfile.mkdtemp(prefix="e", dir=house.folder.path))  # short: SGLang puts Unix sockets into it
    stack.callback(shared_memory.remove, place)
    output, write = chatter.pipe()
    stack.callback(output.close)
    with descriptors(house.folder, write) as (ours, inherited):
        stack.callback(ours.close)
        return ours, output, await starts(boot_message.boot(spec, str(place)), inherited)


async def _carry(
    link: Link,
    chatter: OutputLog,
    output: trio.lowlevel.FdStream,
    aside: trio.CancelScope,
    engine: trio.CancelScope,
) -> None:
    """Run the link and keep the chatter; the link's end is the engine's."""
    with aside:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(chatter.copy_from, output)
            try:
                await link.run()
            except PeerLost:
                pass  # the host's own reason is in `link.received_bye`
            except LocalViolation:
                pass  # the link has logged it, and `_why` says so
            except PeerViolation:
                log.exception("an engine's host broke the protocol")
            engine.cancel(reason="the link to the host is lost")


async def _info(link: Link) -> EngineInfo:
    async with link.ask(GetInfo(), 0) as answer:
        info = await answer.result()
    assert isinstance(info, EngineInfo)
    return info


def _why(link: Link, chatter: OutputLog, name: str) -> ActorError:
    """Return the truth about an engine that ended by itself, in one sentence."""
    if isinstance(link.ended, LocalViolation):
        return EngineDied(f"engine {name} was ended: {link.ended}")
    farewell = link.received_bye
    said = farewell.detail if farewell else f"without a word; its log ends: {chatter.last_error_line}"
    if link.ready and (farewell is None or farewell.code != boot_message.START_FAILED):
        return EngineDied(f"engine {name} ended: {said}")
    if not chatter.persistent:
        log.error("what engine %s said last", name, extra={"lines": list(chatter.tail)[-LAST_LINES:]})
    where = f" (its log: {chatter.path})" if chatter.persistent else ""
    return StartFailed(f"engine {name} did not start: {said}{where}")
