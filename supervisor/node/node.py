"""A node that runs: one process with one `trio.run` and one supervision tree, its signals and its shutdown.

A shutdown has several owners, each of one part:

- `Node` owns when it begins (a signal, an operator), its order and its deadlines: stop admitting, let streams finish
  until `drain_s`, cut the rest with a retryable error, send a goodbye to the other nodes, stop the tree.
- The gateway, the directory and the links own what runs: each can be drained, and waited for.
- `supervise` owns the order in which the tree stops; it is cancelled here, once, when nothing is left to wait for.
- `GracePeriods` owns all waits, so that a second signal shortens every one of them at once.
- The kernel owns the rest: what does not end in time is killed, and the next node removes the folder of a killed one.

If the tree fails, none of these steps is taken, since what the tree has stopped can no longer finish.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from random import SystemRandom

import trio
from attrs import define, field

from protocol.errors import ActorError, NotReady, StartFailed
from protocol.messages.cluster import GateState, Reloaded
from supervisor.config.load import Loaded
from supervisor.config.sections import NodeSection
from supervisor.control import unix_socket
from supervisor.engines import kinds
from supervisor.links.heartbeat import Heartbeat
from supervisor.node.assembly import Assembly
from supervisor.node.garbage import collect_when_idle
from supervisor.node.reload.reload import Reloader
from supervisor.processes import reaper, run_folder
from supervisor.processes.signals import handle_signals, ignore_signals
from supervisor.runtime import Runtime
from supervisor.supervision.events import ChildEvent, ChildEventKind
from supervisor.supervision.status import TreeStatus
from supervisor.supervision.supervise import OnStarted, supervise
from supervisor.telemetry.logs import Terminal
from supervisor.telemetry.loop_monitor import LoopMonitor

log = logging.getLogger(__name__)

BYE_S = 0.05  # for the goodbye to be sent
FAREWELL_S = 2.0  # for cut responses to reach their clients
HARD_EXIT_S = 1.2  # after a second signal
LAST_SPANS_S = 1.0  # for the last spans to be exported
LAST_LINES_S = 0.2  # for the log to be written after that
HEARTBEAT_S = 1.0  # between two heartbeats to a launcher, if its watchdog allows so long
HEARTBEATS_PER_WATCHDOG = 5


@define(eq=False)
class Node:
    """One run of a node; a `SignalHandler`."""

    loaded: Loaded
    assembly: Assembly
    runtime: Runtime
    terminal: Terminal
    drain_s: Callable[[], float]  # in which streams may finish in a drain, as the file has it now
    heartbeat: Callable[[], None] | None = None
    ask_launcher_to_restart: Callable[[bool], None] | None = None  # or not to, although it was asked before
    on_ended: Callable[[], None] = lambda: None
    exit_code: int = 0
    nursery: trio.Nursery | None = None  # while it runs
    _tree: trio.CancelScope = field(factory=trio.CancelScope)
    _signalled: bool = False
    _drains: int = 0  # that leave it down
    _reloader: Reloader | None = None
    _failure: ActorError | None = None

    # What the control service asks, while the node runs ----------------------------------

    @property
    def tree_status(self) -> TreeStatus:
        """The status of its tree."""
        return self.assembly.status

    def gate_state(self) -> GateState | None:
        """Return the state of the gateway's admission gate, None without a gateway."""
        return None if self.assembly.gateway is None else self.assembly.gateway.gate_state()

    async def reload(self) -> Reloaded:
        """Read the node's file again, and return what has changed."""
        if self._reloader is None:
            await trio.lowlevel.checkpoint()
            raise NotReady(f"node {self.assembly.directory.name} has no file")
        return await self._reloader.reload()

    async def drain_for_operator(self, restarts: bool) -> None:  # as a control service calls it
        """Begin the shutdown, after which the launcher starts the node again if it `restarts`.

        Raises `NotReady` if nothing could start it again, or it could not start with its file as it is now. Of several
        drains the last one counts.
        """
        if restarts:
            await self._check_restart()
        else:
            await trio.lowlevel.checkpoint()
        self._shall_restart(restarts)
        self.drain("an operator asks for it")

    async def _check_restart(self) -> None:
        name, drains = self.assembly.directory.name, self._drains
        if self.ask_launcher_to_restart is None or self._reloader is None:
            raise NotReady(f"node {name} has no launcher that could start it again")
        try:
            await self._reloader.check_start()
        except StartFailed as error:
            raise NotReady(f"node {name} runs on, since it could not start again: {error}") from error
        if self._drains != drains:
            raise NotReady(f"node {name} is to stay down: it was asked to drain meanwhile")

    def _shall_restart(self, restarts: bool) -> None:
        """Note whether the launcher shall start the node again after its drain."""
        self._drains += not restarts
        if self.ask_launcher_to_restart is not None:
            self.ask_launcher_to_restart(restarts)

    def drain(self, reason: str) -> None:
        """Begin the shutdown, unless it has begun."""
        if self.nursery is None or self.assembly.directory.draining:
            return
        log.info("draining", extra={"reason": reason, "drain_s": self.drain_s()})
        self.assembly.directory.drain()  # from now on no other node chooses a worker of this one
        self.nursery.start_soon(self._shut_down)

    async def run(self, up: Callable[[], None], announce: Callable[[], None]) -> int:
        """Run the tree and the node's own tasks until the tree ends; return the exit code."""
        reaper.become_subreaper()
        async with trio.open_nursery() as self.nursery:
            nursery = self.nursery
            nursery.start_soon(reaper.run)
            nursery.start_soon(self.terminal.run_live_line)
            nursery.start_soon(self._watch_turns)
            nursery.start_soon(collect_when_idle, lambda: self.running)
            if self.heartbeat is not None:
                nursery.start_soon(send_heartbeats, self.heartbeat, self._section.watchdog_s)
            nursery.start_soon(self._serve_operators)
            if self._reloader is not None:
                nursery.start_soon(self._reloader.run)
            await nursery.start(handle_signals, self)

            def ready() -> None:
                up()
                nursery.start_soon(self.announce_when_ready, announce)

            try:
                with self._tree, self.assembly.controls.node.publish(self):
                    await supervise(
                        self.assembly.tree, rng=SystemRandom(), on_event=self._on_event, task_status=OnStarted(ready)
                    )
            except ActorError as error:
                self._failure = error  # raised below: here, the nursery would wrap it in a group
            nursery.cancel_scope.cancel(reason="the tree has ended")
        ignore_signals()
        reaper.kill_all()
        for writer in self.runtime.metrics.logs.values():  # before the folder is removed with the files of some
            writer.flush(LAST_LINES_S)
        self.runtime.spans.flush(LAST_SPANS_S)
        if self._failure is not None:
            raise self._failure
        log.info("stopped", extra={"exit_code": self.exit_code})
        return self.exit_code

    @property
    def _section(self) -> NodeSection:
        return self.loaded.cluster.node[self.assembly.directory.name]

    async def _serve_operators(self) -> None:
        cluster, controls = self.loaded.cluster, self.assembly.controls
        heartbeat = Heartbeat(cluster.cluster.heartbeat_s, cluster.cluster.silent_s)
        name = self.assembly.directory.name
        await unix_socket.serve(self.runtime.folder, self.loaded.file, name, controls.services, heartbeat)

    @property
    def running(self) -> int:
        """The number of requests that are being answered here: by the gateway, by workers."""
        gateway = self.assembly.gateway
        return self.assembly.directory.running + (0 if gateway is None else gateway.runner.running)

    async def _watch_turns(self) -> None:
        monitor = LoopMonitor()
        monitor.add_metrics(self.runtime.metrics.registry)
        with monitor.watching():
            await trio.sleep_forever()

    def _on_event(self, event: ChildEvent) -> None:
        self.terminal.on_event(event)
        self.assembly.on_event(event)
        if event.kind is ChildEventKind.RESTARTING:
            self.runtime.metrics.child_restarted(event.path)
            if not self.assembly.directory.draining and (reason := self.assembly.start_failure) is not None:
                self._failure = StartFailed(reason)
                self._tree.cancel(reason="no engine could be started")

    async def announce_when_ready(self, announce: Callable[[], None]) -> None:
        """Announce that the node is ready, once every model has an engine on some node."""
        logged_reason = None
        while self.assembly.gateway is not None and (reason := self.assembly.gateway.probes.unready()) is not None:
            if reason != logged_reason:
                log.info("waiting", extra={"reason": reason})
                logged_reason = reason
            await self.assembly.directory.wait_changed()
        if self.assembly.gateway is not None and self.assembly.gateway.port.shared:
            await self.assembly.gateway.port.wait_listening()
        if not self.assembly.directory.draining:
            announce()

    # Signals -----------------------------------------------------------------------------

    @property
    def hung_up(self) -> bool:
        """Whether the terminal of the node has been closed."""
        return self.terminal.hung_up

    def on_reload(self) -> None:
        """Read the configuration again."""
        if self._reloader is not None:
            self._reloader.ask()

    def on_stop(self, name: str) -> bool:
        """Begin the shutdown; return False at a second signal. A drain by an operator counts as no signal."""
        is_first, self._signalled = not self._signalled, True
        if is_first:
            self._shall_restart(False)
            self.drain(name)
        return is_first

    def on_second_signal(self, number: int) -> None:
        """Shorten all waits of the shutdown, and exit soon even if the tree does not end."""
        assert self.nursery is not None  # signals are handled while it runs
        self.exit_code = 128 + number
        self.runtime.grace.shorten()
        self.nursery.start_soon(self._exit_hard)

    # Shutdown ----------------------------------------------------------------------------

    async def _shut_down(self) -> None:
        """Take the steps of a shutdown in order: drain, cut, send a goodbye, stop the tree."""
        assembly, grace = self.assembly, self.runtime.grace
        with grace.wait_at_most(self.drain_s()):
            if assembly.gateway is not None and assembly.gateway.port.shared:
                assembly.gateway.port.leave()
                await assembly.gateway.wait_last_requests()
            if assembly.gateway is not None:
                assembly.gateway.drain()
            if assembly.links is not None:  # until a node learns of the drain, it may choose a worker here
                await trio.sleep(assembly.links.section.announce_s)
            if assembly.gateway is not None:
                await assembly.gateway.gate.wait_empty()
                await assembly.gateway.connections.wait_idle()  # an answer is complete once its client has received it
            await assembly.directory.wait_idle()
        if assembly.gateway is not None:
            if not assembly.gateway.draining:  # a second signal came while it left its port
                assembly.gateway.drain()
            if cut := assembly.gateway.abort():
                log.warning("answers were cut", extra={"count": cut})
            with grace.wait_at_most(FAREWELL_S):
                await assembly.gateway.connections.wait_closed()
        if assembly.links is not None:
            if moved := assembly.directory.running:
                log.warning("answers go on elsewhere", extra={"count": moved})
            assembly.links.send_bye(f"node {assembly.directory.name} shuts down")
            await trio.sleep(BYE_S)
        self._tree.cancel(reason="the node shuts down")

    async def _exit_hard(self) -> None:
        """Exit the process after `HARD_EXIT_S`, without processes or files left behind."""
        await trio.sleep(HARD_EXIT_S)  # cancelled if the tree ends first
        reaper.kill_all()
        run_folder.remove(self.runtime.folder.path, kinds.remove_leftovers)
        self.on_ended()  # else the launcher would start the node again
        self.terminal.flush(LAST_LINES_S)
        os._exit(self.exit_code)


async def send_heartbeats(heartbeat: Callable[[], None], watchdog_s: float) -> None:
    """Send heartbeats to the launcher, which kills a node without one for `watchdog_s` seconds."""
    while True:
        heartbeat()
        await trio.sleep(min(HEARTBEAT_S, watchdog_s / HEARTBEATS_PER_WATCHDOG))
