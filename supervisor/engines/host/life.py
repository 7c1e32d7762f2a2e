"""One life of the host process of an engine: its start, the link to it, and the reason of its end.

The engine's child in the tree lives exactly as long as the host. Whatever ends first (the process, the link, a
scheduler that is silent) ends the rest, and the child then raises one error with the reason in a sentence:
`StartFailed` before the engine could be asked, `EngineDied` after. It may leave nothing behind: no process, no folder,
no shared memory, however it ends.
"""

from __future__ import annotations

import logging
import socket
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Protocol, TypeAlias

import trio
from attrs import field, frozen

from actors.engines import leftover_memory
from actors.engines.host_ends import HOST_ENDS, KILLED, START_FAILED
from actors.engines.shared_tensors import sharing_works
from protocol.errors import ActorError, EngineDied, EngineLost, LocalViolation, PeerLost, PeerViolation, StartFailed
from protocol.link.peer import Peer
from protocol.messages.engine import EngineInfo, GetInfo
from supervisor.engines.host.spawn import Descriptors, host_descriptors
from supervisor.links.link import Link
from supervisor.links.tensor_road import Attachments
from supervisor.links.transport import SocketTransport
from supervisor.processes.output_log import OutputLog
from supervisor.processes.process import GracePeriods, Ladder, Process
from supervisor.processes.run_folder import RunFolder
from supervisor.sockets.descriptor_reserve import DescriptorReserve, is_full
from supervisor.tensors.shared_memory import SharedMemory
from supervisor.tensors.shared_road import SharedMemoryRoad

log = logging.getLogger(__name__)

LADDER = Ladder()  # of the process of an engine
FILES_SUFFIX = ".files"  # of the folder beside an engine's log, for what its operations leave
LAST_OUTPUT_S = 0.5  # for a host's last lines, once it has ended
LAST_LINES = 10  # that are logged of an output log which ends with the node


@frozen
class HostRuntime:
    """Values that all hosts of a node share."""

    folder: RunFolder
    output_log: Callable[[str], OutputLog]
    grace: GracePeriods
    ladder: Ladder
    now: Callable[[], float]
    silent_s: float = 10.0
    shared: SharedMemory = field(factory=SharedMemory)
    lease_s: float = 30.0  # for which a host may come for the tensors of a request
    reserve: DescriptorReserve = field(factory=DescriptorReserve)


Use: TypeAlias = Callable[[Link, Process], Awaitable[str | None]]
"""A function that uses a ready host until its process ends, and returns the reason to end it before, if any."""

StartHost: TypeAlias = Callable[[Path, Path, Descriptors], Awaitable[Process]]
"""Starts a host by its own folder, the folder for what its operations leave, and the descriptors that it inherits."""


class Silenced(Protocol):
    """The port of a host, as far as its silence is watched."""

    async def wait_silent(self, silent_s: float) -> None:
        """Wait until it has given no sign of life for `silent_s`; raises `EngineLost` at its end."""


async def watched(offered: Silenced, process: Process, silent_s: float) -> str | None:
    """Wait until an engine's process ends, or return why it is to be ended before."""
    reason = None

    async def probe() -> None:
        nonlocal reason
        with suppress(EngineLost):
            await offered.wait_silent(silent_s)
            reason = f"its scheduler has neither answered nor computed for {silent_s:g} s"
            nursery.cancel_scope.cancel(reason="it is frozen")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(probe)
        await process.wait()
        nursery.cancel_scope.cancel(reason="its process has ended")
    return reason


async def run_host(
    name: str, start: StartHost, runtime: HostRuntime, use: Use, unexplained: tuple[str, ...] = ()
) -> None:
    """Run the host of the engine with that name, and `use` it once it is ready.

    `unexplained` are the beginnings of its errors about errors of its other processes, found in the log. Raises
    `StartFailed` if it cannot become ready, `EngineDied` when its process or its link ends later.
    """
    output_log = runtime.output_log(name)
    frozen_reason: str | None = None
    with ExitStack() as stack:
        ours, output, process = await _started(name, start, runtime, output_log, stack)
        transport = SocketTransport(trio.SocketStream(trio.socket.from_stdlib_socket(ours)))
        road = SharedMemoryRoad(runtime.shared, runtime.lease_s, process.pid) if sharing_works() else Attachments()
        link = Link(transport, Peer(name, serves_max=0), lost_error=EngineLost, road=road)
        async with trio.open_nursery() as nursery:
            # The link and the output log end with the process; until then they outlive a cancel: stopping needs them.
            outlives = trio.CancelScope(shield=True)
            nursery.start_soon(_carry, link, output_log, output, runtime.shared, outlives, nursery.cancel_scope)
            try:
                await link.wait_ready()
                frozen_reason = await use(link, process)
            finally:
                goodbye = partial(link.send_bye, "shutdown", "the node stops it")
                # A host that still loads does not read its link yet, and a frozen host never will.
                ask = goodbye if link.ready and frozen_reason is None else None
                await process.stop(runtime.ladder, runtime.grace, ask=ask)  # noqa: ASYNC102  # shielded, rung by rung
                outlives.deadline = trio.current_time() + LAST_OUTPUT_S
    if frozen_reason is not None:
        raise EngineDied(f"engine {name} was ended: {frozen_reason}")
    raise _end_error(link, output_log, process, name, unexplained)


_Started: TypeAlias = tuple[socket.socket, trio.lowlevel.FdStream, Process]


async def _started(
    name: str, start: StartHost, runtime: HostRuntime, output_log: OutputLog, stack: ExitStack
) -> _Started:
    """Start a host in a folder of its own, with descriptors of the reserve if there are no others.

    Raises `StartFailed` if the system refuses a descriptor, a process or disk space.
    """
    try:
        try:
            return await _attempt(start, runtime, output_log, stack)
        except OSError as error:
            if not is_full(error):
                raise
        stack.close()  # closes what the attempt has opened
        with runtime.reserve.lend():
            return await _attempt(start, runtime, output_log, stack)
    except OSError as error:
        raise StartFailed(f"engine {name} could not be started: {error.strerror or error}") from error


async def _attempt(start: StartHost, runtime: HostRuntime, output_log: OutputLog, stack: ExitStack) -> _Started:
    runtime.folder.restore()  # a cleaner of /tmp may have removed it while the node ran for weeks
    place = Path(tempfile.mkdtemp(prefix="e", dir=runtime.folder.path))  # short: engines put Unix sockets into it
    stack.callback(leftover_memory.remove, place)
    files = output_log.path.absolute().with_suffix(FILES_SUFFIX)
    output, write = output_log.pipe()
    stack.callback(output.close)
    with host_descriptors(runtime.folder, write) as (ours, inherited):
        stack.callback(ours.close)
        return ours, output, await start(place, files, inherited)


async def _carry(
    link: Link,
    output_log: OutputLog,
    output: trio.lowlevel.FdStream,
    shared: SharedMemory,
    outlives: trio.CancelScope,
    engine: trio.CancelScope,
) -> None:
    """Run the link, copy the output into its log and free shared memory; the end of the link ends the engine."""
    copied = trio.Event()

    async def copy() -> None:
        await output_log.copy_from(output)
        copied.set()

    with outlives:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(copy)
            nursery.start_soon(shared.run)
            try:
                await link.run()
            except PeerLost:
                pass  # the host's own reason is in `link.received_bye`
            except LocalViolation:
                pass  # the link has logged it, and `_end_error` returns it
            except PeerViolation:
                log.exception("an engine's host broke the protocol")
            engine.cancel(reason="the link to the host is lost")
            await copied.wait()  # its last lines have the reason of its end
            nursery.cancel_scope.cancel(reason="the host has ended")


async def engine_info(link: Link) -> EngineInfo:
    """Return the properties and limits of the engine behind a link."""
    async with link.ask(GetInfo(), 0) as answer:
        info = await answer.result()
    assert isinstance(info, EngineInfo)
    return info


def _end_error(
    link: Link, output_log: OutputLog, process: Process, name: str, unexplained: tuple[str, ...]
) -> ActorError:
    """Return the error of an engine that ended by itself, with its reason in one sentence."""
    if isinstance(link.ended, LocalViolation):
        return EngineDied(f"engine {name} was ended: {link.ended}")
    bye, reason = link.received_bye, _reason(link, output_log, process, unexplained)
    if link.ready and (bye is None or bye.code != START_FAILED):
        return EngineDied(f"engine {name} ended: {reason}")
    if not output_log.persistent:
        log.error("the last output of engine %s", name, extra={"lines": list(output_log.tail)[-LAST_LINES:]})
    where = f" (its log: {output_log.path})" if output_log.persistent else ""
    return StartFailed(f"engine {name} did not start: {reason}{where}")


def _reason(link: Link, output_log: OutputLog, process: Process, unexplained: tuple[str, ...]) -> str:
    """Return why a host has ended, by its own account, by its log, or by how its process ended."""
    own = link.received_bye.detail if link.received_bye else ""
    if own and not own.startswith(unexplained):
        return own
    ends = [line.removeprefix(HOST_ENDS) for line in output_log.tail if line.startswith(HOST_ENDS)]
    killed = [line for line in ends if KILLED in line]
    # A host that runs writes why it ends; if it could not, an error in its log may be of a request hours ago.
    sudden = process.end if link.ready and not (own or ends) else None
    if not killed and sudden is not None:
        return f"{sudden}; its log ends: {output_log.last_line}"
    accounts = (*killed[-1:], output_log.last_error, own, *ends[-1:])
    return next(filter(None, accounts), None) or output_log.reason(process.end)
