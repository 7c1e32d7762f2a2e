"""The launcher: the nodes of one machine, each a process that is restarted when it dies, started and stopped together.

Each node is the one child of a tree of its own, so nodes start concurrently (an engine takes its time) and their
restarts are counted separately. Nodes find each other by their links, so the order of their starts does not matter. The
launcher itself serves nothing and holds no state of a request: it must not share the reasons of nodes to fail, so it
does nothing that can take long or grow.

It owns the shutdown of whole nodes and nothing below them: each node owns its drain, each tree the stop of its
children, each ladder the end of a process (docs/architecture.md has the table). The nodes with gateways are stopped
first, since their streams finish over the links to the others; then all others together.

A new node in the file is started when the file is read again: after SIGHUP, or on a node's request to reload. It counts
as one of the nodes once it is up; until then its failure ends no other.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

import trio
from attrs import define, field

from protocol.errors import ActorError, StartFailed
from supervisor.config import placement
from supervisor.config.load import Loaded
from supervisor.config.schema import Cluster
from supervisor.engines import kinds
from supervisor.files.reading import FileReader
from supervisor.launcher import node_process, preflight
from supervisor.launcher.kept_node import KeptNode
from supervisor.launcher.ready_announcer import ReadyAnnouncer
from supervisor.processes import reaper, run_folder
from supervisor.processes.process import GracePeriods
from supervisor.processes.signals import handle_signals, ignore_signals
from supervisor.supervision.supervise import OnStarted, RandomSource, supervise
from supervisor.telemetry.logs import Terminal
from supervisor.telemetry.loop_monitor import LoopMonitor
from supervisor.threads.file_threads import FileThreads

log = logging.getLogger(__name__)

# After a second signal: the limit of a node's end, the delay of its own second signal, the exit of this process, and
# the time to write the log.
SHORTENED_S = 1.1
SECOND_SIGNAL_AFTER_S = 0.05
HARD_EXIT_S = 1.2
LOG_FLUSH_S = 0.2
SETTLE_S = 0.2  # collects the requests of all reloaded nodes


@define(eq=False)
class Launcher:
    """One run of the nodes of this machine; a `SignalHandler`."""

    loaded: Loaded  # the file at the start
    names: Sequence[str]  # the nodes of the start
    command: Sequence[str]  # the command of a node; its name and a descriptor are appended
    environment: Mapping[str, str]
    terminal: Terminal
    chance: RandomSource
    grace: GracePeriods = field(factory=partial(GracePeriods, shortened_s=SHORTENED_S))
    reads: FileReader = field(factory=FileThreads)
    nodes: dict[str, KeptNode] = field(factory=dict)  # all started nodes, ended ones too
    exit_code: int = 0
    _stopping: bool = False
    _failure: ActorError | None = None
    announcer: ReadyAnnouncer = field(init=False)
    _gateways: set[str] = field(init=False)  # the nodes that have, or had, a gateway
    _placed: set[str] = field(factory=set)  # this machine's nodes in the last version of the file
    _reload_wanted: trio.Event = field(factory=trio.Event)
    tasks: trio.Nursery = field(init=False)  # its own nursery, which ends after the nodes
    _node_tasks: trio.Nursery = field(init=False)  # the nursery of `_keep`

    def __attrs_post_init__(self) -> None:
        self._gateways = set(self.loaded.cluster.gateway_nodes)
        self.announcer = ReadyAnnouncer(self.names, self.nodes, self._gateways, self.terminal)

    async def run(self) -> int:
        """Run the nodes until a signal ends them, and return the exit code.

        Raises `StartFailed` or `RestartsExceeded` if one of them does not come up, or does not stay up.
        """
        reaper.become_subreaper()
        async with trio.open_nursery() as self.tasks:
            self.tasks.start_soon(reaper.run)
            self.tasks.start_soon(self.terminal.run_live_line)
            self.tasks.start_soon(self._watch_turns)
            await self.tasks.start(handle_signals, self)
            log.info("starting", extra={"nodes": list(self.names)})
            self.tasks.start_soon(self.follow_file)
            async with trio.open_nursery() as self._node_tasks:
                self._placed = set(self.names)
                for name in self.names:
                    self.start_node(name, self.loaded.cluster)
            self.tasks.cancel_scope.cancel(reason="every node has ended")
        ignore_signals()
        clean_up()
        if self._failure is not None:
            raise self._failure
        log.info("stopped", extra={"exit_code": self.exit_code})
        if self.grace.shortened:
            self.terminal.flush(LOG_FLUSH_S)
            os._exit(self.exit_code)  # the interpreter's own end takes time as well
        return self.exit_code

    async def _watch_turns(self) -> None:
        with LoopMonitor().watching():
            await trio.sleep_forever()

    def start_node(self, name: str, cluster: Cluster) -> None:
        """Start a node of this file and keep it."""
        _, ladder = node_process.time_limits(cluster, name)
        node = KeptNode(name, ladder, cluster.node[name].watchdog_s)
        if (earlier := self.nodes.get(name)) is not None:  # it was drained, and is new in the file again
            node.failures, node.last_failure = earlier.failures, earlier.last_failure
        self.nodes[name] = node
        self._gateways.update(cluster.gateway_nodes)
        self._node_tasks.start_soon(self._keep, node, cluster)

    async def _keep(self, node: KeptNode, cluster: Cluster) -> None:
        """Keep one node until it is stopped; its failure stops all nodes, unless it is new in the file."""
        was_up = False

        def on_up() -> None:
            nonlocal was_up
            was_up = True
            self.announcer.on_up(node.name)

        try:
            with node.scope:
                tree = node_process.tree(cluster, node, self)
                on_event = self.terminal.on_event
                await supervise(tree, rng=self.chance, on_event=on_event, task_status=OnStarted(on_up))
        except ActorError as error:
            if was_up or cluster is self.loaded.cluster:
                self._failure = self._failure or error
                self._stop()
            else:
                self._log_not_started(node.name, error)
        finally:
            node.ended.set()

    # The file ----------------------------------------------------------------------------

    def reload(self) -> None:
        """Read the file again, a moment later: start its new nodes, and log the removed ones.

        Starting nodes read it again once they are up.
        """
        for node in self.nodes.values():
            node.outdated = node.outdated or not node.serving
        self._reload_wanted.set()

    async def follow_file(self) -> None:
        """Act on each request to read the file again, until cancelled."""
        while True:
            await self._reload_wanted.wait()
            await trio.sleep(SETTLE_S)
            self._reload_wanted = trio.Event()
            try:
                new, placed, failures = await self.reads(partial(self._read, self._placed | self._running))
                if not self._stopping and self._running:  # else the nodes' nursery is closed, or will be
                    self._apply(new, placed, failures)
            except StartFailed as error:
                log.error("the file changes nothing", extra={"reason": str(error)})  # noqa: TRY400  # no traceback
            except Exception:  # the content of a file must not end nodes
                log.exception("a bug ended a reload")

    def _read(self, not_new: set[str]) -> tuple[Cluster, set[str], dict[str, StartFailed]]:
        """Return the present file, its nodes on this machine, and the failures of new ones that cannot be started.

        Raises `StartFailed` if the file is wrong.
        """
        new = self.loaded.again().cluster
        here = {host: placement.is_local_host(host) for host in {node.host for node in new.node.values()}}
        placed = {name for name, node in new.node.items() if here[node.host]}
        failures = {}
        for name in placed - not_new:
            try:
                preflight.check_can_start(new, name)
            except StartFailed as error:
                failures[name] = error
        return new, placed, failures

    def _apply(self, new: Cluster, placed: set[str], failures: Mapping[str, StartFailed]) -> None:
        running = self._running
        for name in sorted(running):
            node = self.nodes[name]
            was_removed, node.removed = node.removed, name not in new.node
            if not node.removed:  # its `drain_s` may be longer now
                _, ladder = node_process.time_limits(new, name)
                node.ladder = max(node.ladder, ladder, key=lambda ladder: ladder.term_s)
                continue
            if not was_removed:
                log.warning("node %s is in the file no more, and runs until it is drained", name)
            if not node.serving:  # there is nothing to drain
                node.scope.cancel(reason="it is in the file no more")
        added, self._placed = placed - self._placed - running, placed
        for name in (key for key in new.node if key in added):
            if name in failures:
                self._log_not_started(name, failures[name])
            else:
                log.info("node %s is new in the file, and is started", name)
                self.start_node(name, new)

    @property
    def _running(self) -> set[str]:
        return {name for name, node in self.nodes.items() if node.running}

    def _log_not_started(self, name: str, error: ActorError) -> None:
        self._placed.discard(name)  # the next reload tries it again
        log.error("node %s was not started; the others run on", name, extra={"reason": str(error)})

    def announce(self, name: str, text: str) -> None:
        """Announce a gateway's address to the operator; see `ReadyAnnouncer`."""
        self.announcer.announce(name, text)

    # Signals -----------------------------------------------------------------------------

    @property
    def hung_up(self) -> bool:
        """Whether the terminal of the launcher has been closed."""
        return self.terminal.hung_up

    def on_reload(self) -> None:
        """Read the file again, here and in every node; starting nodes read it once they are up."""
        self._signal(signal.SIGHUP, serving=True)
        self.reload()

    def on_stop(self, name: str) -> bool:
        """Stop every node; return False if that has begun before."""
        if self._stopping:
            return False
        log.info("draining", extra={"signal": name})
        self._stop()
        return True

    def on_second_signal(self, number: int) -> None:
        """Shorten the stop of every node; the exit code becomes 128 plus `number`."""
        self.exit_code = 128 + number
        self.tasks.start_soon(self._end_sooner)

    # The end -----------------------------------------------------------------------------

    def _stop(self) -> None:
        if not self._stopping:
            self._stopping = self.announcer.closed = True
            self.tasks.start_soon(self._stop_in_order)

    async def _stop_in_order(self) -> None:
        """Let the nodes with gateways finish their streams while the others serve them, then stop the others."""
        first = [node for name, node in self.nodes.items() if name in self._gateways]
        for node in first:
            node.scope.cancel(reason="the launcher stops")
        for node in first:
            await node.ended.wait()
        self._stop_all()

    def _stop_all(self) -> None:
        for node in self.nodes.values():
            node.scope.cancel(reason="the launcher stops")

    async def _end_sooner(self) -> None:
        """Shorten the stop of every node, and exit in time even if some do not end."""
        self.grace.shorten()
        self._stop_all()
        await trio.sleep(SECOND_SIGNAL_AFTER_S)  # some nodes get their first signal only now
        self._signal(signal.SIGINT)  # a second SIGTERM could be merged with the first
        await trio.sleep(HARD_EXIT_S - SECOND_SIGNAL_AFTER_S)
        clean_up()
        self.terminal.flush(LOG_FLUSH_S)
        os._exit(self.exit_code)

    def _signal(self, number: signal.Signals, *, serving: bool = False) -> None:
        """Send a signal to the process groups of all nodes, or only of serving ones."""
        for node in self.nodes.values():
            if node.process is not None and (node.serving or not serving):
                node.process.signal_group(number)


def clean_up() -> None:
    """Kill the remaining processes below this one, and remove the remains of killed nodes."""
    reaper.kill_all()
    with suppress(StartFailed):  # no temporary folder is left
        run_folder.remove_stale(run_folder.base_folder(), kinds.remove_leftovers)
