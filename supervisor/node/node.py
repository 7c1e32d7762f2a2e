"""A node: one process, one tree, and the plan by which it shuts down."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from random import Random, SystemRandom

import trio
from attrs import define, field, frozen

from actors.engines.sglang import shared_memory
from protocol.errors import ActorError, StartFailed
from protocol.greeting import NONCE_BYTES
from supervisor.cluster import link_credentials
from supervisor.config.load import LOOPBACK_HOSTS, Cluster
from supervisor.control import unix_socket
from supervisor.gateway.keys import SECRET_VARIABLES
from supervisor.links.heartbeat import Heartbeat
from supervisor.node import file_checks
from supervisor.node.assembly import Assembly, assemble
from supervisor.node.credentials import Credentials, read_credentials
from supervisor.node.reload import Reloader
from supervisor.processes import reaper, run_folder
from supervisor.processes.process import GracePeriods
from supervisor.runtime import Runtime
from supervisor.supervision.events import ChildEvent, ChildEventKind
from supervisor.supervision.status import EarlierFailures
from supervisor.supervision.supervise import OnStarted, supervise
from supervisor.telemetry.logs import Terminal
from supervisor.telemetry.loop_monitor import LoopMonitor
from supervisor.telemetry.metrics import Metrics
from supervisor.threads.text_threads import TextThreads

log = logging.getLogger(__name__)

ROOM_BITS = 63  # of a rendezvous, as SGLang counts them
BYE_S = 0.05  # for the last word to leave
FAREWELL_S = 2.0  # for cut answers to reach their clients
HARD_EXIT_S = 1.2  # after a second signal
LAST_LINES_S = 0.2  # for the log to be written after that
PULSE_S = 1.0  # at most, and at most a fifth of the time after which a launcher ends a node that hangs
PULSES_PER_LIMIT = 5
SECRETS = frozenset((*SECRET_VARIABLES, link_credentials.SECRET))  # that engines must not see
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@frozen
class LauncherHooks:
    """What a node says to its launcher: it is up, there may be something new in the file, its event loop turns."""

    up: Callable[[], None] = lambda: None
    reload: Callable[[], None] | None = None
    pulse: Callable[[], None] | None = None
    earlier: EarlierFailures = EarlierFailures()  # what the launcher knows of this node's processes before this one


NOT_LAUNCHED = LauncherHooks()


async def run(
    cluster: Cluster,
    name: str,
    terminal: Terminal,
    environment: Mapping[str, str],
    launched: LauncherHooks = NOT_LAUNCHED,
) -> int:
    """Run one node until a signal ends it, and return the process's exit code; `launched` is for its launcher.

    Raises `StartFailed` or `RestartsExceeded` if its tree does not come up, or does not stay up.
    """
    credentials = read_credentials(cluster, name, environment)
    link_credentials.check_certificate_names(cluster, name, credentials.tls)
    base = Path(tempfile.gettempdir())
    for swept in run_folder.remove_stale(base, shared_memory.remove):
        log.info("removed what a killed node had left", extra={"folder": str(swept)})
    with run_folder.run_folder(base, shared_memory.remove) as folder:
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
            aside=TextThreads(cluster.gateway.text),
            grace=GracePeriods(),
            metrics=Metrics(),
            chance=Random,
            new_nonce=new_nonce,
            new_room=partial(next, _rooms(secrets.randbits(ROOM_BITS))),
        )
        runtime.metrics.logs[name] = terminal.log
        assembly = assemble(cluster, name, runtime, credentials)
        assembly.status.earlier_failures = launched.earlier
        node = _Node(cluster, assembly, runtime, terminal, section.drain_s, launched.pulse)
        node.obey(Reloader(name, cluster, assembly, environment, node.set_drain_s, launched.reload))
        for danger in file_checks.warnings(cluster, runtime.now()):
            log.warning(danger)
        _warn_of_plain_keys(cluster, credentials)
        log.info("starting", extra={"node": name, "engine_logs": str(logs)})
        runtime.reserve.fill()
        return await node.run(launched.up, partial(_announce, cluster, assembly, terminal))


@define(eq=False)
class _Node:
    """One run of a node."""

    cluster: Cluster
    assembly: Assembly
    runtime: Runtime
    terminal: Terminal
    drain_s: float
    pulse: Callable[[], None] | None = None  # to a launcher
    exit_code: int = 0
    _tree: trio.CancelScope = field(factory=trio.CancelScope)
    _nursery: trio.Nursery | None = None  # while it runs
    _signalled: bool = False
    _reloader: Reloader | None = None
    _failure: ActorError | None = None

    def obey(self, reloader: Reloader) -> None:
        """Let operators drain this node, reload its file and see who is at its gate."""
        self._reloader = reloader
        self.assembly.controls.drain = partial(self.drain, "an operator asks for it")
        self.assembly.controls.reload = reloader.reload
        if self.assembly.gateway is not None:
            self.assembly.controls.gate_state = self.assembly.gateway.gate.state

    def set_drain_s(self, drain_s: float) -> None:
        """Give streams another time to finish when this node drains."""
        self.drain_s = drain_s

    def drain(self, why: str) -> None:
        """Begin to shut down, unless that has begun: admit nothing, let streams finish, end."""
        if self._nursery is None or self.assembly.directory.draining:
            return
        log.info("draining", extra={"why": why, "drain_s": self.drain_s})
        self.assembly.directory.drain()  # from now on other nodes choose this one's workers no more
        self._nursery.start_soon(self._shut_down)

    async def run(self, up: Callable[[], None], announce: Callable[[], None]) -> int:
        """Run the tree until it is told to end."""
        reaper.become_subreaper()
        async with trio.open_nursery() as self._nursery:
            nursery = self._nursery
            nursery.start_soon(reaper.run)
            nursery.start_soon(self.terminal.run_live_line)
            nursery.start_soon(self._watch_turns)
            if self.pulse is not None:
                nursery.start_soon(_pulses, self.pulse, self.cluster.node[self.assembly.directory.name].watchdog_s)
            nursery.start_soon(self._answer_operators)
            if self._reloader is not None:
                nursery.start_soon(self._reloader.run)
            await nursery.start(self._listen, nursery)

            def ready() -> None:
                up()
                nursery.start_soon(self._announce, announce)

            try:
                with self._tree:
                    await supervise(
                        self.assembly.tree, rng=SystemRandom(), on_event=self._watch, task_status=OnStarted(ready)
                    )
            except ActorError as error:
                self._failure = error  # raised below: here, the nursery would wrap it in a group
            nursery.cancel_scope.cancel(reason="the tree has ended")
        for number in SIGNALS:  # whoever asks for the end now has it already, with the exit code that is due
            signal.signal(number, signal.SIG_IGN)
        reaper.kill_all()
        for each in self.runtime.metrics.logs.values():  # the folder may go with what is written to it
            each.flush(LAST_LINES_S)
        if self._failure is not None:
            raise self._failure
        log.info("stopped", extra={"exit_code": self.exit_code})
        return self.exit_code

    async def _answer_operators(self) -> None:
        cluster, controls = self.cluster, self.assembly.controls
        heart = Heartbeat(cluster.cluster.heartbeat_s, cluster.cluster.silent_s)
        name = self.assembly.directory.name
        await unix_socket.serve(self.runtime.folder, cluster.file, name, controls.serves, heart)

    async def _watch_turns(self) -> None:
        turns = LoopMonitor(self.cluster.node[self.assembly.directory.name].turn_max_s)
        turns.add_metrics(self.runtime.metrics.registry)
        with turns.watching():
            await trio.sleep_forever()

    def _watch(self, event: ChildEvent) -> None:
        self.terminal.on_event(event)
        self.assembly.on_event(event)
        if event.kind is ChildEventKind.RESTARTING:
            self.runtime.metrics.child_restarted(event.path)
            if not self.assembly.directory.draining and (why := self.assembly.start_failure) is not None:
                self._failure = StartFailed(why)
                self._tree.cancel(reason="no engine could be started")

    async def _announce(self, announce: Callable[[], None]) -> None:
        """Say that the node is ready, once what it serves is there, on whichever node that is."""
        said = None
        while self.assembly.gateway is not None and (why := self.assembly.gateway.unready()) is not None:
            if why != said:
                log.info("waiting", extra={"reason": why})
                said = why
            await self.assembly.directory.wait_changed()
        if not self.assembly.directory.draining:
            announce()

    async def _listen(self, nursery: trio.Nursery, *, task_status: trio.TaskStatus[None]) -> None:
        """Begin the plan at the first signal, hurry it at the second; a hang-up is a wish to read the file anew."""
        with trio.open_signal_receiver(*SIGNALS) as signals:
            task_status.started()
            async for number in signals:
                name = signal.Signals(number).name
                if number == signal.SIGHUP and not self.terminal.hung_up:
                    if self._reloader is not None:
                        self._reloader.ask()
                elif not self._signalled:
                    self._signalled = True
                    self.drain(name)
                else:
                    log.warning("hurrying", extra={"signal": name})
                    self.exit_code = 128 + number
                    self.runtime.grace.shorten()
                    nursery.start_soon(self._exit_hard)

    async def _shut_down(self) -> None:
        """Stop admitting, let streams finish, end the rest truthfully, stop the tree."""
        assembly, grace = self.assembly, self.runtime.grace
        with grace.wait_at_most(self.drain_s):
            if assembly.gateway is not None:
                assembly.gateway.drain()
            if assembly.links is not None:  # whoever has not heard it yet may still choose a worker of this node
                await trio.sleep(assembly.links.section.tell_s)
            if assembly.gateway is not None:
                await assembly.gateway.gate.wait_empty()
                await assembly.gateway.connections.wait_idle()  # an answer is whole when the client has it
            await assembly.directory.wait_idle()
        if assembly.gateway is not None:
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
        """Be gone in time whatever does not end; nothing is left behind all the same."""
        await trio.sleep(HARD_EXIT_S)  # a tree that has ended by then cancels this
        reaper.kill_all()
        run_folder.remove(self.runtime.folder.path, shared_memory.remove)
        self.terminal.flush(LAST_LINES_S)
        os._exit(self.exit_code)


async def _pulses(pulse: Callable[[], None], watchdog_s: float) -> None:
    """Show for as long as this node's event loop turns that it does, to whoever ends a node that hangs."""
    while True:
        pulse()
        await trio.sleep(min(PULSE_S, watchdog_s / PULSES_PER_LIMIT))


def _warn_of_plain_keys(cluster: Cluster, credentials: Credentials) -> None:
    wanted = credentials.keys is not None and credentials.keys.wanted
    if wanted and credentials.client_tls is None and cluster.gateway.host not in LOOPBACK_HOSTS:
        log.warning("clients send their keys in the clear: there is no gateway.tls_certificate")


def new_nonce() -> bytes:
    """Return bytes for a greeting that were never used before."""
    return secrets.token_bytes(NONCE_BYTES)


def _rooms(first: int) -> Iterator[int]:
    """Yield numbers of rooms, none of them twice, and from another beginning than any other node's."""
    return (room % 2**ROOM_BITS for room in count(first))


def _announce(cluster: Cluster, assembly: Assembly, terminal: Terminal) -> None:
    """Say where to knock, and give a line to paste."""
    section = cluster.gateway
    if assembly.gateway is None:
        ranks = (f"a rank of {name}" for name in cluster.follower_ranks_on(assembly.directory.name))
        here = (name for name, plug in assembly.engines.items() if plug.current is not None)
        terminal.announce(f"Ready: node {assembly.directory.name} with {', '.join((*here, *ranks))}")
        return
    host = f"[{section.host}]" if ":" in section.host else section.host
    url = f"http{'s' * (assembly.gateway.tls is not None)}://{host}:{assembly.gateway.port}"
    key = "-H 'authorization: Bearer YOUR-KEY' " if assembly.gateway.keys.wanted else ""
    model = next(iter(cluster.model))
    body = (
        f'{{"model": "{model}", "stream": true, "messages": [{{"role": "user", "content": "Tell me about the oak"}}]}}'
    )
    terminal.announce("")
    terminal.announce(f"Ready: {url}  models: {', '.join(cluster.model)}  (Ctrl-C drains and stops)")
    terminal.announce(f"Try:   curl -sN {key}{url}/v1/chat/completions -d '{body}'")
    terminal.announce("")
