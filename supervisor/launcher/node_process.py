"""One node's process under its launcher: started, watched, killed when its event loop blocks, started again.

A node's process dies without warning or hangs without dying, and only another process can notice both. So a node sends
heartbeats over a pipe (`parent_pipe`) from its own event loop. Their absence is counted in ticks of the launcher's own
event loop, never by the clock: no tick passes on a suspended machine or in a stopped launcher, so no node is killed for
heartbeats that its launcher has missed.

Each life of the process is one run of a child (`run`), and the supervisor of that child restarts it. State that must
outlive a life is in `KeptNode`. Of the launcher this module uses only the interface `NodeKeeper`.
"""

from __future__ import annotations

import logging
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import inf

import trio
from attrs import define, field

from actors.engines.slots.deadlines import RELEASE_S
from protocol.errors import ActorError, StartFailed
from supervisor.config.schema import Cluster
from supervisor.launcher.kept_node import KeptNode, NodeKeeper
from supervisor.launcher.parent_pipe import LineReader, receive
from supervisor.processes import reaper
from supervisor.processes.process import Ladder, Process, start
from supervisor.supervision.tree import Backoff, Child, Restart, Tree
from supervisor.telemetry.logs import Terminal, readable_line

log = logging.getLogger(__name__)

NOT_LIMITED_S = 1e9  # no limit of the supervisor's: `run` limits the start of each life
START_S = 60.0  # the start of a node without its engines and their imports
STOP_S = 15.0  # the stop of a drained node without its engines
STOP_S_MAX = 1e6  # the ladder ends a node long before; a reload may lengthen the ladder
OUTPUT_DRAIN_S = 0.5  # the time to show the last output of an ended node
TICK_MAX_S = 1.0  # the time between two checks for a heartbeat
TICKS_PER_LIMIT = 5
STACK_S = 0.5  # the time of a hung node to write its stacks
STACK_LINES_MAX = 100


class NodeDied(ActorError):
    """A node's process has ended; its launcher starts another."""


RESTARTED = "an operator asked to start it again"


@define(eq=False)
class ProcessLife:
    """One life of a node's process, in the state of its received messages."""

    up: bool = False
    done: bool = False
    # Whether a draining node is to be started again, by the last request of an operator; neither without a drain.
    restarts: bool = False
    stays_down: bool = False
    has_beaten: bool = False
    silent_s: float = 0.0
    reason: str = ""
    hung: bool = False
    stack: deque[str] = field(factory=lambda: deque(maxlen=STACK_LINES_MAX))  # lines without a message


def time_limits(cluster: Cluster, name: str) -> tuple[float, Ladder]:
    """Return the limit of a node's start in seconds, and the ladder of its stop."""
    engines = [engine for engine in cluster.engine.values() if name in engine.nodes]
    start_s = START_S + max((engine.imports_s for engine in engines), default=0.0)
    own = [engine for engine in engines if engine.node == name]
    # An engine that spans several nodes first waits for the others.
    start_s += sum(engine.start_within_s * (2 if engine.nodes[1:] else 1) for engine in own)
    stop_s = STOP_S + len(engines) * (Ladder().total_s + RELEASE_S)
    return start_s, Ladder(term_s=cluster.node[name].drain_s + stop_s)


def tree(cluster: Cluster, node: KeptNode, keeper: NodeKeeper) -> Tree:
    """Return the supervision tree of one node: its process is the only child."""
    start_s, _ = time_limits(cluster, node.name)
    process = Child(
        name="process",
        run=run,
        args=(node, keeper, start_s),
        restart=Restart.TRANSIENT,  # a node drained by an operator stays down
        significant=True,
        start_within_s=NOT_LIMITED_S,
        stop_within_s=STOP_S_MAX,
        about="the node, in a process of its own",
    )
    return Tree(
        name=node.name,
        children=(process,),
        # With these waits it never fails so often: it is retried while the other nodes run, which it must not end.
        restarts_max=30,
        restarts_window_s=300.0,
        backoff=Backoff(min_s=0.1, crashes=True),
        about=f"node on {cluster.node[node.name].host}",
    )


async def run(
    node: KeptNode,
    keeper: NodeKeeper,
    start_s: float,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run one node's process until it ends as requested; `started()` means that its tree is up.

    If the process hangs or is restarted by an operator before it is up, the next one is started at once. Each has
    `start_s` seconds to come up. Raises `StartFailed` if it does not, and `NodeDied` when it ends later.
    """
    while True:
        life = ProcessLife()
        with trio.CancelScope(deadline=trio.current_time() + start_s) as starting:
            await _run_once(node, keeper, life, partial(_end_limit, starting, task_status.started))
        if starting.cancelled_caught:
            life.reason = f"it was not up within {start_s:g} s"
        if not life.done:
            node.record_failure(life.reason or "it ended without a reason")
        if life.stays_down and not life.done:  # the operator's drain has been confirmed
            log.error("node %s has ended while it drained, and is not started again", node.name)
            life.done = True
        again = life.hung or (life.restarts and not life.done and not node.removed)
        if life.up or starting.cancelled_caught or not again:  # it may have hung while it was stopped as too slow
            break
    if not life.done:
        _raise_failure(node, life)
    elif not life.up:
        task_status.started()  # drained before it was up


def _end_limit(starting: trio.CancelScope, on_up: Callable[[], None]) -> None:
    """Lift the limit of a node's start, since it is up."""
    starting.deadline = inf
    on_up()


async def _run_once(node: KeptNode, keeper: NodeKeeper, life: ProcessLife, on_up: Callable[[], None]) -> None:
    """Run one life of the process from its start to its end."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    try:
        async with trio.lowlevel.FdStream(read_end) as stream, trio.open_nursery() as nursery:
            # Its log is shown while it is stopped as well, and it may hang then as at any other time.
            output_scope, heartbeats_scope, watchdog = _shield(), _shield(), _shield()
            try:
                process = _start(node, write_end, keeper, nursery, output_scope)
            finally:
                os.close(write_end)
            node.process, node.outdated = process, False
            lines = LineReader(stream)
            nursery.start_soon(watch, node, process, life, watchdog)
            try:
                await receive_all(node, keeper, life, lines, on_up)
                watchdog.cancel()  # the process has ended
            finally:
                node.serving = False
                nursery.start_soon(receive_heartbeats, life, lines, heartbeats_scope)
                await process.stop(node.ladder, keeper.grace)  # noqa: ASYNC102  # shielded, rung by rung
                watchdog.cancel()
                node.process, life.reason = None, life.reason or process.end or ""
                output_scope.deadline = heartbeats_scope.deadline = trio.current_time() + OUTPUT_DRAIN_S
    finally:
        if life.hung:
            log.error("where node %s hung", node.name, extra={"stack": list(life.stack)})


def _shield() -> trio.CancelScope:
    """Return the scope of a task that continues during the stop of a process, and is ended thereafter."""
    return trio.CancelScope(shield=True)


async def receive_all(
    node: KeptNode, keeper: NodeKeeper, life: ProcessLife, lines: LineReader, on_up: Callable[[], None]
) -> None:
    """Act on each message of a node until its process has ended."""
    while (message := await receive(lines, life.stack)) is not None:
        life.silent_s = 0.0
        match message:
            case "heartbeat", _:
                life.has_beaten = True
            case "up", _ if not life.up:
                life.up = node.serving = True
                node.reload_if_outdated()
                on_up()
            case "announce", text:
                keeper.announce(node.name, text)
            case "reload", _:
                keeper.reload()
            case "failed", text:
                life.reason = text
            case "restart" | "stay" as kind, _:
                life.restarts, life.stays_down = kind == "restart", kind == "stay"
            case "done", _:
                life.done = not life.restarts or node.removed
                life.reason = RESTARTED if life.restarts else life.reason


async def receive_heartbeats(life: ProcessLife, lines: LineReader, scope: trio.CancelScope) -> None:
    """Record the heartbeats of a stopping node; its other messages come too late."""
    with scope:
        while (message := await receive(lines, life.stack)) is not None:
            life.silent_s = 0.0
            life.has_beaten = life.has_beaten or message[0] == "heartbeat"


async def watch(node: KeptNode, process: Process, life: ProcessLife, scope: trio.CancelScope) -> None:
    """Kill a node without heartbeats for `watchdog_s`; before the first one only the limit of its start counts."""
    limit_s = node.watchdog_s
    tick_s = min(TICK_MAX_S, limit_s / TICKS_PER_LIMIT)
    with scope:
        while life.silent_s < limit_s:
            await trio.sleep(tick_s)
            life.silent_s += tick_s * life.has_beaten
        life.hung, life.reason = True, f"its event loop did not turn for {limit_s:g} s"
        log.error("node %s hangs, and is ended", node.name, extra={"hung_s": limit_s})
        life.stack.clear()
        process.send_signal(signal.SIGQUIT)  # writes the stacks of all threads, unless the process is stopped
        await trio.sleep(STACK_S)
        process.signal_group(signal.SIGKILL)


def _raise_failure(node: KeptNode, life: ProcessLife) -> None:
    """Raise the reason of a node's unrequested end, unless it has been removed from the file."""
    reason = f": {life.reason}" if life.reason else ""
    if not life.up:
        raise StartFailed(f"node {node.name} did not start{reason}")
    if not node.removed:
        raise NodeDied(f"node {node.name} ended{reason}")
    log.error("node %s has ended, and is not started again: the file has it no more", node.name)


def _start(
    node: KeptNode, write_end: int, keeper: NodeKeeper, nursery: trio.Nursery, output_scope: trio.CancelScope
) -> Process:
    command = [*keeper.command, "--node", node.name, "--launched", str(write_end), *node.arguments()]
    with _output(node.name, keeper.terminal, nursery, output_scope) as output:
        name, environment = f"node {node.name}", dict(keeper.environment)
        return start(name, command, environment, [write_end], output, _prepare)


def _prepare() -> None:
    """Prepare a new process: it dies with this one, and SIGHUP is blocked until it has a handler."""
    reaper.die_with_parent()
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGHUP,))


@contextmanager
def _output(name: str, terminal: Terminal, nursery: trio.Nursery, output_scope: trio.CancelScope) -> Iterator[int]:
    """Yield the descriptor of a node's log: a pipe to this process if it has a terminal, else this process's output."""
    if not terminal.live:
        yield terminal.out.fileno()
        return
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    nursery.start_soon(_show, name, trio.lowlevel.FdStream(read_end), terminal, output_scope)
    try:
        yield write_end
    finally:
        os.close(write_end)


async def _show(name: str, stream: trio.lowlevel.FdStream, terminal: Terminal, output_scope: trio.CancelScope) -> None:
    """Show a node's log, also during its stop."""
    with output_scope:
        async with stream:
            lines = LineReader(stream)
            while (text := await lines.read()) is not None:
                if (line := readable_line(name, text)) is not None:
                    terminal.line(line)
