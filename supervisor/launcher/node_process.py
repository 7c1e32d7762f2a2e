"""One node's process, as its launcher keeps it: started, heard, ended when its event loop turns no more, remade.

A node says over a pipe that its loop turns. Silence counts by the launcher's own ticks: a host that was suspended, or a
launcher that was stopped, has seen none of them, and ends no node that was stopped with it.
"""

from __future__ import annotations

import logging
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio
from attrs import define, field

from protocol.errors import ActorError, StartFailed
from supervisor.launcher.parent_pipe import LineReader, hear
from supervisor.processes import reaper
from supervisor.processes.process import Process, start
from supervisor.telemetry.logs import Terminal, readable_line

if TYPE_CHECKING:
    from supervisor.launcher.launcher import Launcher

log = logging.getLogger(__name__)

LAST_LINES_S = 0.5  # for what an ended node has written to be shown
LOOKS_MAX_S = 1.0  # between two looks whether a node has said that its loop turns
LOOKS_PER_LIMIT = 5
STACK_S = 0.5  # for a node that hangs to say where
STACK_LINES_MAX = 100


class NodeDied(ActorError):
    """A node's process has ended; its launcher starts another."""


@define(eq=False)
class _Life:
    """One life of a node's process, by what it has said."""

    up: bool = False
    done: bool = False
    pulsed: bool = False
    silent_s: float = 0.0
    why: str = ""
    hung: bool = False
    stack: deque[str] = field(factory=lambda: deque(maxlen=STACK_LINES_MAX))  # what is no word to a launcher


async def run(name: str, launcher: Launcher, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """Keep one node's process; `started()` means that its tree is up. Returns once it has done as it was asked to: end.

    One that hangs before it is up is started again at once. Raises `StartFailed` if it does not come up, and `NodeDied`
    when it ends later.
    """
    while True:
        life = _Life()
        await _live(name, launcher, life, task_status.started)
        if not life.done:
            launcher.ended(name, life.why or "it ended without a word")
        if life.up or not life.hung:
            break
    if not life.done:
        _died(name, launcher, life)
    elif not life.up:
        task_status.started()  # it was drained before it was up, and has done as it was asked to


async def _live(name: str, launcher: Launcher, life: _Life, is_up: Callable[[], None]) -> None:
    hears, says = os.pipe2(os.O_CLOEXEC)
    async with trio.lowlevel.FdStream(hears) as stream, trio.open_nursery() as nursery:
        aside = trio.CancelScope(shield=True)  # what it logs while it is ended is shown as well
        try:
            process = _started(name, says, launcher, nursery, aside)
        finally:
            os.close(says)
        launcher.processes[name] = process
        watch = trio.CancelScope()
        nursery.start_soon(_watch, name, launcher.watchdog_s(name), process, life, watch)
        try:
            await _hear(name, launcher, life, LineReader(stream), is_up)
        finally:
            watch.cancel()
            launcher.serving.discard(name)
            await process.stop(launcher.ladder(name), launcher.grace)  # noqa: ASYNC102  # shielded, rung by rung
            del launcher.processes[name]
            aside.deadline = trio.current_time() + LAST_LINES_S
    if life.hung:
        log.error("where node %s hung", name, extra={"stack": list(life.stack)})


async def _hear(name: str, launcher: Launcher, life: _Life, lines: LineReader, is_up: Callable[[], None]) -> None:
    """Hear what a node says until it has ended."""
    while (heard := await hear(lines, life.stack)) is not None:
        life.silent_s = 0.0
        match heard:
            case "pulse", _:
                life.pulsed = True
            case "up", _ if not life.up:
                life.up = True
                launcher.serving.add(name)
                is_up()
            case "tell", text:
                launcher.tell(name, text)
            case "reload", _:
                launcher.reload()
            case "failed", text:
                life.why = text
            case "done", _:
                life.done = True


async def _watch(name: str, watchdog_s: float, process: Process, life: _Life, scope: trio.CancelScope) -> None:
    """End a node whose event loop has not turned for too long; before it first has, the limit for its start counts."""
    tick_s = min(LOOKS_MAX_S, watchdog_s / LOOKS_PER_LIMIT)
    with scope:
        while life.silent_s < watchdog_s:
            await trio.sleep(tick_s)
            life.silent_s += tick_s * life.pulsed
        life.hung, life.why = True, f"its event loop did not turn for {watchdog_s:g} s"
        log.error("node %s hangs, and is ended", name, extra={"silent_s": watchdog_s})
        life.stack.clear()
        process.send_signal(signal.SIGQUIT)  # it says where all of its threads are, if it is not stopped
        await trio.sleep(STACK_S)
        process.signal_group(signal.SIGKILL)


def _died(name: str, launcher: Launcher, life: _Life) -> None:
    """Raise what has become of a node that nobody told to end, unless the file has it no more."""
    why = f": {life.why}" if life.why else ""
    if not life.up:
        raise StartFailed(f"node {name} did not start{why}")
    if name not in launcher.gone:
        raise NodeDied(f"node {name} ended{why}")
    log.error("node %s has ended, and is not started again: the file has it no more", name)


def _started(name: str, says: int, launcher: Launcher, nursery: trio.Nursery, aside: trio.CancelScope) -> Process:
    command = [*launcher.command, "--node", name, "--launched", str(says), *launcher.earlier(name)]
    with _output(name, launcher.terminal, nursery, aside) as output:
        return start(f"node {name}", command, dict(launcher.environment), [says], output, reaper.die_with_parent)


@contextmanager
def _output(name: str, terminal: Terminal, nursery: trio.Nursery, aside: trio.CancelScope) -> Iterator[int]:
    """Yield where a node may write what it logs: to a terminal by way of us, else where we write ourselves."""
    if not terminal.live:
        yield terminal.out.fileno()
        return
    reads, writes = os.pipe2(os.O_CLOEXEC)
    nursery.start_soon(_show, name, trio.lowlevel.FdStream(reads), terminal, aside)
    try:
        yield writes
    finally:
        os.close(writes)


async def _show(name: str, stream: trio.lowlevel.FdStream, terminal: Terminal, aside: trio.CancelScope) -> None:
    """Show what a node logs, while it is ended as well."""
    with aside:
        async with stream:
            lines = LineReader(stream)
            while (text := await lines.read()) is not None:
                if (line := readable_line(name, text)) is not None:
                    terminal.line(line)
