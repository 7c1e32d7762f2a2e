"""The launcher: the nodes of one host, each a process that is remade when it dies; they start and stop together.

Each node is the one child of a tree of its own, as a zygote is: the trees come up beside each other, because an engine
takes its time, and the deaths of one node are not counted with another's. Nodes find each other by their links, so that
the order in which they start means nothing. They stop in order: first the one with the gateway, whose streams finish
over the links to the others, then the others.

A node that is new in the file is started when the file is read anew: after a hang-up, or when a node has been told to
reload. It is one of the others once it is up; until then they do not fall because of it.
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import trio
from attrs import define, field

from actors.engines.sglang import shared_memory
from protocol.errors import ActorError, StartFailed
from supervisor.config import placement
from supervisor.config.load import Cluster
from supervisor.engines.kinds import read_cluster
from supervisor.files.reading import FileReader
from supervisor.launcher import node_process, preflight
from supervisor.processes import reaper, run_folder
from supervisor.processes.process import GracePeriods, Ladder, Process
from supervisor.supervision.supervise import OnStarted, RandomSource, supervise
from supervisor.supervision.tree import Backoff, Child, Restart, Tree
from supervisor.telemetry.logs import Terminal
from supervisor.telemetry.loop_monitor import LoopMonitor
from supervisor.threads.file_threads import FileThreads

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
START_S = 60.0  # of a node, beside its engines and what they are forked from
STOP_S = 15.0  # of a node that has drained, beside its engines
STOP_S_MAX = 1e6  # the ladder ends a node long before, and a reload may have made it longer
HURRIED_S = 1.1  # from a second signal to the last of a node
AGAIN_S = 0.05  # after which those that have heard only one signal hear the second
HARD_EXIT_S = 1.2  # after a second signal, as for one node
SETTLE_S = 0.2  # in which every node that was told to reload has said so
FAREWELL_S = 0.2  # for the log to be written after a second signal


def tree(cluster: Cluster, name: str, launcher: Launcher) -> Tree:
    """Return one node as its launcher sees it."""
    start_s, _ = _patience(cluster, name)
    process = Child(
        name="process",
        run=node_process.run,
        args=(name, launcher),
        restart=Restart.TRANSIENT,  # an operator who drains a node wants it gone
        significant=True,
        start_within_s=start_s,
        stop_within_s=STOP_S_MAX,
        about="the node, in a process of its own",
    )
    return Tree(
        name=name,
        children=(process,),
        # With these waits it never fails so often: it is tried for as long as the others run, who must not end with it.
        restarts_max=30,
        restarts_window_s=300.0,
        backoff=Backoff(min_s=0.1, crashes=True),
        about=f"node on {cluster.node[name].host}",
    )


def _patience(cluster: Cluster, name: str) -> tuple[float, Ladder]:
    """Return how long a node may take to start, and to stop when it is asked once."""
    engines = [each for each in cluster.engine.values() if name in each.nodes]
    start_s = START_S + max((each.imports_s for each in engines), default=0.0)
    own = [each for each in engines if each.node == name]
    start_s += sum(each.start_within_s * (2 if each.nodes[1:] else 1) for each in own)  # one waits for the other nodes
    stop_s = STOP_S + sum(each.ladder.total_s + each.deadlines.release_s for each in engines)
    return start_s, Ladder(term_s=cluster.node[name].drain_s + stop_s)


@define(eq=False)
class Launcher:
    """One run of the nodes of this host."""

    cluster: Cluster  # as its file was at the start
    names: Sequence[str]  # of the nodes that are started then
    command: Sequence[str]  # that runs a node; a node's name and a descriptor come behind it
    environment: Mapping[str, str]
    terminal: Terminal
    chance: RandomSource
    grace: GracePeriods = field(factory=partial(GracePeriods, shortened_s=HURRIED_S))
    reads: FileReader = field(factory=FileThreads)
    processes: dict[str, Process] = field(factory=dict)  # of the nodes that live
    serving: set[str] = field(factory=set)  # those of them that are up
    gone: set[str] = field(factory=set)  # those that the file has no more
    exit_code: int = 0
    _stopping: bool = False
    _failure: ActorError | None = None
    _kept: dict[str, trio.CancelScope] = field(factory=dict)
    _ended: dict[str, trio.Event] = field(factory=dict)
    _up: set[str] = field(factory=set)  # have been ready, at least once
    _told: list[str] = field(factory=list)  # by the node with the gateway, to be said when all have been ready
    _ladders: dict[str, Ladder] = field(factory=dict)
    _hung_s: dict[str, float] = field(factory=dict)
    _earlier: dict[str, tuple[int, str]] = field(factory=dict)  # how often a node has ended, and why it did last
    _placed: set[str] = field(factory=set)  # on this host, by the file as it was read last
    _asked: trio.Event = field(factory=trio.Event)  # to read the file anew
    _nodes: trio.Nursery | None = None  # while they run

    async def run(self) -> int:
        """Run the nodes until a signal ends them, and return the exit code.

        Raises `StartFailed` or `RestartsExceeded` if one of them does not come up, or does not stay up.
        """
        reaper.become_subreaper()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reaper.run)
            nursery.start_soon(self.terminal.run_live_line)
            nursery.start_soon(self._watch_turns)
            await nursery.start(self._listen, nursery)
            log.info("starting", extra={"nodes": list(self.names)})
            nursery.start_soon(self._keep_up_with_file, nursery)
            async with trio.open_nursery() as self._nodes:
                self._placed = set(self.names)
                for name in self.names:
                    self._start(name, self.cluster, nursery)
            nursery.cancel_scope.cancel(reason="every node has ended")
        for number in SIGNALS:  # as a node does: whoever asks for the end now has it already
            signal.signal(number, signal.SIG_IGN)
        _leave_nothing()
        if self._failure is not None:
            raise self._failure
        log.info("stopped", extra={"exit_code": self.exit_code})
        if self.grace.shortened:
            self.terminal.flush(FAREWELL_S)
            os._exit(self.exit_code)  # an interpreter takes its time to end, too
        return self.exit_code

    async def _watch_turns(self) -> None:
        with LoopMonitor(self.cluster.node[self.names[0]].turn_max_s).watching():
            await trio.sleep_forever()

    def _start(self, name: str, cluster: Cluster, nursery: trio.Nursery) -> None:
        assert self._nodes is not None
        self._kept[name], self._ended[name] = trio.CancelScope(), trio.Event()
        self._ladders[name], self._hung_s[name] = _patience(cluster, name)[1], cluster.node[name].watchdog_s
        self._nodes.start_soon(self._keep, name, cluster, nursery)

    async def _keep(self, name: str, cluster: Cluster, nursery: trio.Nursery) -> None:
        """Keep one node until it is told to stop; if it cannot be kept, all stop, but not for one that is new."""
        came_up = False

        def is_up() -> None:
            nonlocal came_up
            came_up = True
            self._is_up(name)

        try:
            with self._kept[name]:
                one = tree(cluster, name, self)
                await supervise(one, rng=self.chance, on_event=self.terminal.on_event, task_status=OnStarted(is_up))
        except ActorError as error:
            if came_up or cluster is self.cluster:
                self._failure = self._failure or error
                self._stop(nursery)
            else:
                self._not_started(name, error)
        finally:
            self._ended[name].set()

    def ended(self, name: str, why: str) -> None:
        """Note that a node's process has ended, and was not asked to."""
        times, _ = self._earlier.get(name, (0, ""))
        self._earlier[name] = times + 1, why

    def earlier(self, name: str) -> tuple[str, ...]:
        """Return what a node's next process is told of those before it, for whoever asks it how it is."""
        times, why = self._earlier.get(name, (0, ""))
        return ("--restarts", str(times), "--ended-by", why) if times else ()

    def watchdog_s(self, name: str) -> float:
        """Return for how long a node's event loop may stand still."""
        return self._hung_s[name]

    def ladder(self, name: str) -> Ladder:
        """Return how long a node may take to end."""
        return self._ladders[name]

    # What is new in the file -------------------------------------------------------------

    def reload(self) -> None:
        """Read the file anew, a moment later: start nodes that are new in it, and say which it has no more."""
        self._asked.set()

    async def _keep_up_with_file(self, nursery: trio.Nursery) -> None:
        while True:
            await self._asked.wait()
            await trio.sleep(SETTLE_S)
            self._asked = trio.Event()
            try:
                new, placed, failed = await self.reads(partial(self._read, self._placed | self._alive))
                if not self._stopping and self._alive:  # else the nodes' nursery is closed, or will be
                    self._apply(new, placed, failed, nursery)
            except StartFailed as error:
                log.error("the file changes nothing", extra={"reason": str(error)})  # noqa: TRY400  # no traceback
            except Exception:  # nodes must not fall because of what stands in a file
                log.exception("a bug ended a reload")

    def _read(self, known: set[str]) -> tuple[Cluster, set[str], dict[str, StartFailed]]:
        """Return the file as it is now, the nodes that it places on this host, and why new ones could not be started.

        Raises `StartFailed` if the file is wrong.
        """
        new = read_cluster(self.cluster.file, self.cluster.joined)
        here = {host: placement.is_local_host(host) for host in {node.host for node in new.node.values()}}
        placed = {name for name, node in new.node.items() if here[node.host]}
        failed = {}
        for name in placed - known:
            try:
                preflight.check_can_start(new, name)
            except StartFailed as error:
                failed[name] = error
        return new, placed, failed

    def _apply(self, new: Cluster, placed: set[str], failed: Mapping[str, StartFailed], nursery: trio.Nursery) -> None:
        alive = self._alive
        for name in sorted(alive & new.node.keys()):  # it may have been given longer to drain
            self._ladders[name] = max(self._ladders[name], _patience(new, name)[1], key=lambda ladder: ladder.term_s)
        gone, self.gone = self.gone, alive - new.node.keys()
        for name in sorted(self.gone - gone):
            log.warning("node %s is in the file no more, and runs until it is drained", name)
        for name in self.gone - self.serving:  # it could not even start: there is no such node
            self._kept[name].cancel(reason="the file has it no more")
        fresh, self._placed = placed - self._placed - alive, placed
        for name in (each for each in new.node if each in fresh):
            if name in failed:
                self._not_started(name, failed[name])
            else:
                log.info("node %s is new in the file, and is started", name)
                self._start(name, new, nursery)

    @property
    def _alive(self) -> set[str]:
        return {name for name, ended in self._ended.items() if not ended.is_set()}

    def _not_started(self, name: str, error: ActorError) -> None:
        self._placed.discard(name)  # so that the next reload tries it again
        log.error("node %s was not started; the others run on", name, extra={"reason": str(error)})

    # What the nodes say ------------------------------------------------------------------

    def tell(self, name: str, text: str) -> None:
        """Pass on where to knock; what a node without a gateway would tell is in the log."""
        if name == self.cluster.gateway.node:
            self._told.append(text)
            self._say_ready()

    def _is_up(self, name: str) -> None:
        self._up.add(name)
        if self.cluster.gateway.node not in self.names and self._all_up:
            ready = (each for each in self._ended if each in self._up & self._alive)
            self._told.append(f"Ready: nodes {', '.join(ready)}  (Ctrl-C drains and stops)")
        self._say_ready()

    @property
    def _all_up(self) -> bool:
        """Whether each node that was started at first has been ready, but for those that the file has no more."""
        return self._up.issuperset(name for name in self.names if name not in self.gone)

    def _say_ready(self) -> None:
        """Say that all is ready, once it is, and where to knock whenever the gateway has come back."""
        if self._all_up and not self._stopping:
            for text in self._told:
                self.terminal.announce(text)
            self._told.clear()

    # How it ends -------------------------------------------------------------------------

    async def _listen(self, nursery: trio.Nursery, *, task_status: trio.TaskStatus[None]) -> None:
        """Stop at the first signal, hurry at the second; at a hang-up the file is read anew, here and by every node."""
        with trio.open_signal_receiver(*SIGNALS) as signals:
            task_status.started()
            async for number in signals:
                name = signal.Signals(number).name
                if number == signal.SIGHUP and not self.terminal.hung_up:
                    self._signal(signal.SIGHUP, self.serving)  # one that still loads would die of it
                    self.reload()
                elif not self._stopping:
                    log.info("draining", extra={"signal": name})
                    self._stop(nursery)
                else:
                    log.warning("hurrying", extra={"signal": name})
                    self.exit_code = 128 + number
                    nursery.start_soon(self._hurry)

    def _stop(self, nursery: trio.Nursery) -> None:
        if not self._stopping:
            self._stopping = True
            nursery.start_soon(self._stop_in_order)

    async def _stop_in_order(self) -> None:
        """Let the node with the gateway finish its streams while the others serve them, then end the others."""
        first = self.cluster.gateway.node
        if first in self._kept:
            self._kept[first].cancel(reason="the launcher stops")
            await self._ended[first].wait()
        self._stop_all()

    def _stop_all(self) -> None:
        for kept in self._kept.values():
            kept.cancel(reason="the launcher stops")

    async def _hurry(self) -> None:
        """Make every node hurry, and be gone in time whatever does not end."""
        self.grace.shorten()
        self._stop_all()
        await trio.sleep(AGAIN_S)  # nodes that have only now been told to stop are told once more to hurry
        self._signal(signal.SIGINT, self.processes)  # a second SIGTERM could melt into the first
        await trio.sleep(HARD_EXIT_S - AGAIN_S)
        _leave_nothing()
        self.terminal.flush(FAREWELL_S)
        os._exit(self.exit_code)

    def _signal(self, number: signal.Signals, names: Iterable[str]) -> None:
        for name in names:
            if name in self.processes:
                self.processes[name].signal_group(number)


def _leave_nothing() -> None:
    """End what is left below this process, and remove what a node that was killed could not remove itself."""
    reaper.kill_all()
    run_folder.remove_stale(Path(tempfile.gettempdir()), shared_memory.remove)
