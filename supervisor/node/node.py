"""A node: one process with one `trio.run` and one supervision tree, and its shutdown.

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
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from random import Random, SystemRandom

import trio
from attrs import define, field, frozen

from actors.engines import leftover_memory
from protocol.errors import ActorError, NotReady, StartFailed
from protocol.link.greeting import NONCE_BYTES
from supervisor.cluster import link_credentials
from supervisor.config.load import Loaded
from supervisor.config.schema import Cluster
from supervisor.config.sections import LOOPBACK_HOSTS, NodeSection
from supervisor.control import unix_socket
from supervisor.gateway.keys.keys import SECRET_VARIABLES
from supervisor.links.heartbeat import Heartbeat
from supervisor.node.assembly import Assembly, assemble
from supervisor.node.credentials import Credentials, read_credentials
from supervisor.node.garbage import collect_when_idle
from supervisor.node.reload import file_checks
from supervisor.node.reload.reload import Reloader
from supervisor.processes import reaper, run_folder
from supervisor.processes.process import GracePeriods
from supervisor.processes.signals import handle_signals, ignore_signals
from supervisor.runtime import Runtime
from supervisor.supervision.events import ChildEvent, ChildEventKind
from supervisor.supervision.status import EarlierFailures
from supervisor.supervision.supervise import OnStarted, supervise
from supervisor.telemetry.logs import Terminal
from supervisor.telemetry.loop_monitor import LoopMonitor
from supervisor.telemetry.metrics import Metrics
from supervisor.threads.text_threads import TextThreads

log = logging.getLogger(__name__)

NUMBER_BITS = 63  # of the numbers of hand-offs, such as SGLang's rooms
BYE_S = 0.05  # for the goodbye to be sent
FAREWELL_S = 2.0  # for cut responses to reach their clients
HARD_EXIT_S = 1.2  # after a second signal
LAST_LINES_S = 0.2  # for the log to be written after that
HEARTBEAT_S = 1.0  # between two heartbeats to a launcher, if its watchdog allows so long
HEARTBEATS_PER_WATCHDOG = 5
SECRETS = frozenset((*SECRET_VARIABLES, link_credentials.SECRET))  # variables that no engine's process may have


@frozen
class LauncherHooks:
    """Messages of a node to the launcher that has started it, and what that knows of earlier processes of the node."""

    up: Callable[[], None] = lambda: None  # the tree is ready
    reload: Callable[[], None] | None = None  # the file may have new nodes
    restart: Callable[[bool], None] | None = None  # whether another process shall follow this one, which drains
    heartbeat: Callable[[], None] | None = None  # the event loop runs
    earlier: EarlierFailures = EarlierFailures()
    done: Callable[[], None] = lambda: None  # the process ends as it was asked to


NOT_LAUNCHED = LauncherHooks()


async def run(
    loaded: Loaded,
    name: str,
    terminal: Terminal,
    environment: Mapping[str, str],
    launched: LauncherHooks = NOT_LAUNCHED,
) -> int:
    """Run one node until a signal or an operator stops it, and return the exit code of the process.

    Raises `StartFailed` or `RestartsExceeded` if its tree does not become ready, or fails too often.
    """
    cluster = loaded.cluster
    credentials = read_credentials(cluster, name, environment)
    link_credentials.check_certificate_names(cluster, name, credentials.tls)
    base = Path(tempfile.gettempdir())
    for stale in run_folder.remove_stale(base, leftover_memory.remove):
        log.info("removed what a killed node had left", extra={"folder": str(stale)})
    with run_folder.run_folder(base, leftover_memory.remove) as folder:
        section = cluster.node[name]
        logs = folder.path if section.logs is None else Path(section.logs)
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StartFailed(f"the folder for logs cannot be made: {error}") from error
        runtime = Runtime(
            folder=folder,
            logs=logs,
            environment={key: value for key, value in environment.items() if key not in SECRETS},
            new_id=partial(secrets.token_hex, 16),
            now=time.time,
            strftime=time.strftime,
            run_in_thread=TextThreads(),
            grace=GracePeriods(),
            metrics=Metrics(),
            chance=Random,
            new_nonce=new_nonce,
            new_number=partial(next, _numbers(secrets.randbits(NUMBER_BITS))),
        )
        runtime.metrics.logs[name] = terminal.log
        assembly = assemble(cluster, name, runtime, credentials)
        assembly.status.earlier_failures = launched.earlier
        node = Node(
            loaded, assembly, runtime, terminal, section.drain_s, launched.heartbeat, launched.restart, launched.done
        )
        node.attach_controls(Reloader(name, loaded, assembly, environment, node.set_drain_s, launched.reload))
        for warning in file_checks.warnings(cluster, runtime.now()):
            log.warning(warning)
        _warn_of_keys_without_tls(cluster, credentials)
        log.info("starting", extra={"node": name, "engine_logs": str(logs)})
        runtime.reserve.fill()
        return await node.run(launched.up, partial(_announce, cluster, assembly, terminal))


@define(eq=False)
class Node:
    """One run of a node; a `SignalHandler`."""

    loaded: Loaded
    assembly: Assembly
    runtime: Runtime
    terminal: Terminal
    drain_s: float
    heartbeat: Callable[[], None] | None = None
    ask_launcher_to_restart: Callable[[bool], None] | None = None  # or not to, although it was asked before
    tell_launcher_of_end: Callable[[], None] = lambda: None
    exit_code: int = 0
    nursery: trio.Nursery | None = None  # while it runs
    _tree: trio.CancelScope = field(factory=trio.CancelScope)
    _signalled: bool = False
    _drains: int = 0  # that leave it down
    _reloader: Reloader | None = None
    _failure: ActorError | None = None

    def attach_controls(self, reloader: Reloader) -> None:
        """Connect the control service to this node: drain, reload, and the state of the admission gate."""
        self._reloader = reloader
        self.assembly.controls.drain = self.drain_for_operator
        self.assembly.controls.reload = reloader.reload
        if self.assembly.gateway is not None:
            self.assembly.controls.gate_state = self.assembly.gateway.gate_state

    def set_drain_s(self, drain_s: float) -> None:
        """Set the time in seconds in which streams may finish in a drain."""
        self.drain_s = drain_s

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
        log.info("draining", extra={"reason": reason, "drain_s": self.drain_s})
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
                with self._tree:
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
        with grace.wait_at_most(self.drain_s):
            if assembly.gateway is not None and assembly.gateway.port.shared:
                assembly.gateway.port.leave()
                await assembly.gateway.wait_last_requests()
            if assembly.gateway is not None:
                assembly.gateway.drain()
            if assembly.links is not None:  # until a node learns of the drain, it may choose a worker here
                await trio.sleep(assembly.links.section.tell_s)
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
        run_folder.remove(self.runtime.folder.path, leftover_memory.remove)
        self.tell_launcher_of_end()  # else it would start the node again
        self.terminal.flush(LAST_LINES_S)
        os._exit(self.exit_code)


async def send_heartbeats(heartbeat: Callable[[], None], watchdog_s: float) -> None:
    """Send heartbeats to the launcher, which kills a node that has sent none for `watchdog_s` seconds."""
    while True:
        heartbeat()
        await trio.sleep(min(HEARTBEAT_S, watchdog_s / HEARTBEATS_PER_WATCHDOG))


def _warn_of_keys_without_tls(cluster: Cluster, credentials: Credentials) -> None:
    keys_wanted = credentials.keys is not None and credentials.keys.wanted
    if keys_wanted and credentials.client_tls is None and cluster.gateway.host not in LOOPBACK_HOSTS:
        log.warning("clients send their keys in the clear: there is no gateway.tls_certificate")


def new_nonce() -> bytes:
    """Return random bytes for a greeting."""
    return secrets.token_bytes(NONCE_BYTES)


def _numbers(first: int) -> Iterator[int]:
    """Yield the numbers from `first` on, each once; nodes begin at random numbers, far from each other."""
    return (number % 2**NUMBER_BITS for number in count(first))


def _announce(cluster: Cluster, assembly: Assembly, terminal: Terminal) -> None:
    """Announce the server's address and a command to try, or the engines of a node without a gateway."""
    section = cluster.gateway
    if assembly.gateway is None:
        ranks = (f"a rank of {name}" for name in cluster.follower_ranks_on(assembly.directory.name))
        engines = (name for name, engine in assembly.engines.items() if engine.current is not None)
        terminal.announce(f"Ready: node {assembly.directory.name} with {', '.join((*engines, *ranks))}")
        return
    host = f"[{section.host}]" if ":" in section.host else section.host
    url = f"http{'s' * (assembly.gateway.port.tls is not None)}://{host}:{assembly.gateway.port.number}"
    key = "-H 'authorization: Bearer YOUR-KEY' " if assembly.gateway.keys.wanted else ""
    model = next(iter(cluster.model))
    body = (
        f'{{"model": "{model}", "stream": true, "messages": [{{"role": "user", "content": "Tell me about the oak"}}]}}'
    )
    terminal.announce("")
    terminal.announce(f"Ready: {url}  models: {', '.join(cluster.model)}  (Ctrl-C drains and stops)")
    terminal.announce(f"Try:   curl -sN {key}{url}/v1/chat/completions -d '{body}'")
    terminal.announce("")
