"""The launcher: the nodes of one host, each a process that is remade when it dies; they start and stop together.

Each node is the one child of a tree of its own, as a zygote is: the trees come up beside each other, because an engine
takes its time, and the deaths of one node are not counted with another's. Nodes find each other by their links, so that
the order in which they start means nothing. They stop in order: first the one with the gateway, whose streams finish
over the links to the others, then the others.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import trio
from attrs import define, field, frozen

from protocol.errors import ActorError, StartFailed
from supervisor import reaper
from supervisor.config import Cluster
from supervisor.process import Hurry, Ladder, Process, start
from supervisor.run import Chance, supervise
from supervisor.say import Terminal, readable
from supervisor.tree import Backoff, Child, Restart, Tree
from supervisor.upward import Lines, hear

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
START_S = 60.0  # of a node, beside its engines and what they are forked from
ZYGOTE_S = 120.0
STOP_S = 15.0  # of a node that has drained, beside its engines
HURRIED_S = 1.4  # from a second signal to the last of a node; it takes 1.2 s at most to end by itself
AGAIN_S = 0.1  # after which those that have heard only one signal hear the second
HARD_EXIT_S = 1.8
LAST_LINES_S = 0.5  # for what an ended node has written to be shown


class NodeDied(ActorError):
    """A node's process has ended; its launcher starts another."""


def tree(cluster: Cluster, name: str, launcher: Launcher) -> Tree:
    """Return one node as its launcher sees it."""
    start_s, ladder = _patience(cluster, name)
    process = Child(
        name="process",
        run=_process,
        args=(name, ladder, launcher),
        restart=Restart.TRANSIENT,  # an operator who drains a node wants it gone
        significant=True,
        start_within_s=start_s,
        stop_within_s=ladder.term_s + ladder.kill_s + 2.0,
        about="the node, in a process of its own",
    )
    return Tree(
        name=name,
        children=(process,),
        restarts_max=30,
        restarts_window_s=300.0,
        backoff=Backoff(min_s=1.0),
        about=f"node on {cluster.node[name].host}",
    )


def _patience(cluster: Cluster, name: str) -> tuple[float, Ladder]:
    """Return how long a node may take to start, and to stop when it is asked once."""
    engines = cluster.engines_on(name).values()
    start_s = START_S + ZYGOTE_S * any(each.device == "cpu" for each in engines)
    start_s += sum(each.start_within_s for each in engines)
    stop_s = STOP_S + sum(each.ladder.total_s + each.deadlines.release_s for each in engines)
    return start_s, Ladder(term_s=cluster.node[name].drain_s + stop_s)


@define(eq=False)
class Launcher:
    """One run of the nodes of this host."""

    cluster: Cluster
    names: Sequence[str]
    command: Sequence[str]  # that runs a node; a node's name and a descriptor come behind it
    environment: Mapping[str, str]
    terminal: Terminal
    chance: Chance
    hurry: Hurry = field(factory=partial(Hurry, soon_s=HURRIED_S))
    processes: dict[str, Process] = field(factory=dict)  # of the nodes that live
    serving: set[str] = field(factory=set)  # those of them that are up
    exit_code: int = 0
    _stopping: bool = False
    _failure: ActorError | None = None
    _kept: dict[str, trio.CancelScope] = field(factory=dict)
    _ended: dict[str, trio.Event] = field(factory=dict)
    _up: set[str] = field(factory=set)  # have been ready, at least once
    _told: list[str] = field(factory=list)  # by the node with the gateway, to be said when all have been ready

    def __attrs_post_init__(self) -> None:
        for name in self.names:
            self._kept[name], self._ended[name] = trio.CancelScope(), trio.Event()

    async def run(self) -> int:
        """Run the nodes until a signal ends them, and return the exit code.

        Raises `StartFailed` or `RestartsExceeded` if one of them does not come up, or does not stay up.
        """
        reaper.adopt()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reaper.run)
            nursery.start_soon(self.terminal.keep_live)
            await nursery.start(self._listen, nursery)
            log.info("starting", extra={"nodes": list(self.names)})
            async with trio.open_nursery() as nodes:
                for name in self.names:
                    nodes.start_soon(self._keep, name, nursery)
            nursery.cancel_scope.cancel(reason="every node has ended")
        reaper.end_all()
        if self._failure is not None:
            raise self._failure
        log.info("stopped", extra={"exit_code": self.exit_code})
        return self.exit_code

    async def _keep(self, name: str, nursery: trio.Nursery) -> None:
        """Keep one node until it is told to stop; if it cannot be kept, all stop."""
        one, is_up = tree(self.cluster, name, self), _Up(partial(self._is_up, name))
        try:
            with self._kept[name]:
                await supervise(one, rng=self.chance, watch=self.terminal.watch, task_status=is_up)
        except ActorError as error:
            self._failure = self._failure or error
            self._stop(nursery)
        finally:
            self._ended[name].set()

    # What the nodes say ------------------------------------------------------------------

    def tell(self, name: str, text: str) -> None:
        """Pass on where to knock; what a node without a gateway would tell is in the log."""
        if name == self.cluster.gateway.node:
            self._told.append(text)
            self._say_ready()

    def _is_up(self, name: str) -> None:
        self._up.add(name)
        if self.cluster.gateway.node not in self.names and self._up == set(self.names):
            self._told.append(f"Ready: nodes {', '.join(self.names)}  (Ctrl-C drains and stops)")
        self._say_ready()

    def _say_ready(self) -> None:
        """Say that all is ready, once it is, and where to knock whenever the gateway has come back."""
        if self._up == set(self.names) and not self._stopping:
            for text in self._told:
                self.terminal.tell(text)
            self._told.clear()

    # How it ends -------------------------------------------------------------------------

    async def _listen(self, nursery: trio.Nursery, *, task_status: trio.TaskStatus[None]) -> None:
        """Stop at the first signal, hurry at the second; a hang-up is for the nodes to hear."""
        with trio.open_signal_receiver(*SIGNALS) as signals:
            task_status.started()
            async for number in signals:
                name = signal.Signals(number).name
                if number == signal.SIGHUP and not self.terminal.gone:
                    self._signal(signal.SIGHUP, self.serving)  # one that still loads would die of it
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
        self.hurry.now()
        self._stop_all()
        await trio.sleep(AGAIN_S)  # nodes that have only now been told to stop are told once more to hurry
        self._signal(signal.SIGTERM, self.names)
        await trio.sleep(HARD_EXIT_S - AGAIN_S)
        reaper.end_all()
        os._exit(self.exit_code)

    def _signal(self, number: signal.Signals, names: Collection[str]) -> None:
        for name in names:
            if name in self.processes:
                self.processes[name].signal_group(number)


@frozen
class _Up:
    """Where a tree says that it is up."""

    ready: Callable[[], None]

    def started(self, value: object = None) -> None:  # noqa: ARG002  # the shape of Trio's own
        """Pass it on."""
        self.ready()


# One node ------------------------------------------------------------------------------


async def _process(
    name: str, ladder: Ladder, launcher: Launcher, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Keep one node's process; `started()` means that its tree is up. Returns once it has done as it was asked to: end.

    Raises `StartFailed` if it does not come up, and `NodeDied` when it ends later.
    """
    hears, says = os.pipe2(os.O_CLOEXEC)
    async with trio.lowlevel.FdStream(hears) as stream, trio.open_nursery() as nursery:
        aside = trio.CancelScope(shield=True)  # what it logs while it is ended is shown as well
        with _output(name, launcher.terminal, nursery, aside) as output:
            command = [*launcher.command, "--node", name, "--launched", str(says)]
            process = start(f"node {name}", command, dict(launcher.environment), [says], output, reaper.die_with_parent)
            os.close(says)
        launcher.processes[name] = process
        up, done, why = False, False, ""
        try:
            lines = Lines(stream)
            while (heard := await hear(lines)) is not None:
                match heard:
                    case "up", _ if not up:
                        up = True
                        launcher.serving.add(name)
                        task_status.started()
                    case "tell", text:
                        launcher.tell(name, text)
                    case "failed", text:
                        why = f": {text}"
                    case "done", _:
                        done = True
        finally:
            launcher.serving.discard(name)
            await process.end(ladder, launcher.hurry)  # noqa: ASYNC102  # shielded, rung by rung
            del launcher.processes[name]
            aside.deadline = trio.current_time() + LAST_LINES_S
    if up and done:
        return
    if not up:
        raise StartFailed(f"node {name} did not start{why}")
    raise NodeDied(f"node {name} ended{why}")


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
            lines = Lines(stream)
            while (text := await lines.read()) is not None:
                if (line := readable(name, text)) is not None:
                    with suppress(OSError):  # the terminal is gone; the node is not
                        terminal.line(line)
