"""The start of a node: its credentials, its folder, its runtime and its tree, before anything of it runs.

Everything that a node may do to the machine is put into its `Runtime` here: clocks, chance, threads, folders.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from random import Random

from attrs import frozen

from protocol.errors import StartFailed
from protocol.link.greeting import NONCE_BYTES
from supervisor.cluster import link_credentials
from supervisor.config.load import Loaded
from supervisor.config.schema import Cluster
from supervisor.config.sections import LOOPBACK_HOSTS
from supervisor.engines import kinds
from supervisor.gateway.keys.key_sources import SECRET_VARIABLES
from supervisor.media.filter_check import check_filter
from supervisor.node.assembly import Assembly, assemble
from supervisor.node.credentials import Credentials, read_credentials
from supervisor.node.example_request import example_request
from supervisor.node.media_child import NAME as MEDIA
from supervisor.node.node import Node
from supervisor.node.reload import file_checks
from supervisor.node.reload.reload import Reloader
from supervisor.node.tracing import spans_of
from supervisor.processes import run_folder
from supervisor.processes.process import GracePeriods
from supervisor.processes.run_folder import RunFolder
from supervisor.runtime import Runtime
from supervisor.supervision.status import NO_FAILURES, EarlierFailures
from supervisor.telemetry.logs import Terminal
from supervisor.telemetry.metrics import Metrics
from supervisor.threads.text_threads import TextThreads

log = logging.getLogger(__name__)

SECRET_BYTES = 32  # of random in the secret of a launcher
NUMBER_BITS = 63  # of the numbers of hand-offs
# Variables that no engine's process may have.
SECRETS = frozenset((*SECRET_VARIABLES, link_credentials.SECRET, link_credentials.START_SECRET))


@frozen
class LauncherHooks:
    """Callbacks from a node to its launcher, and the launcher's record of earlier failures of the node."""

    up: Callable[[], None] = lambda: None  # the tree is ready
    reload: Callable[[], None] | None = None  # the file may have new nodes
    restart: Callable[[bool], None] | None = None  # whether another process shall follow this one, which drains
    heartbeat: Callable[[], None] | None = None  # the event loop runs
    earlier: EarlierFailures = NO_FAILURES
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
    base = run_folder.base_folder()
    for stale in run_folder.remove_stale(base, kinds.remove_leftovers):
        log.info("removed what a killed node had left", extra={"folder": str(stale)})
    with run_folder.run_folder(base, kinds.remove_leftovers) as folder:
        section = cluster.node[name]
        logs = folder.path if section.logs is None else Path(section.logs)
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StartFailed(f"the folder for logs cannot be made: {error}") from error
        runtime = _runtime(cluster, name, folder, logs, environment)
        runtime.metrics.logs[name] = terminal.log
        assembly = assemble(cluster, name, runtime, credentials, launched.earlier)
        if MEDIA in assembly.published:
            check_filter(cluster.gateway.media)
        reloader = Reloader(name, loaded, assembly, environment, launched.reload)
        node = Node(
            loaded=loaded,
            assembly=assembly,
            runtime=runtime,
            terminal=terminal,
            drain_s=lambda: reloader.drain_s,
            heartbeat=launched.heartbeat,
            ask_launcher_to_restart=launched.restart,
            on_ended=launched.done,
            reloader=reloader,
        )
        for warning in file_checks.warnings(cluster, runtime.now()):
            log.warning(warning)
        _warn_of_keys_without_tls(cluster, credentials)
        log.info("starting", extra={"node": name, "engine_logs": str(logs)})
        runtime.reserve.fill()
        return await node.run(launched.up, partial(_announce, cluster, assembly, terminal))


def _runtime(cluster: Cluster, name: str, folder: RunFolder, logs: Path, environment: Mapping[str, str]) -> Runtime:
    new_id, metrics = partial(secrets.token_hex, 16), Metrics()
    return Runtime(
        folder=folder,
        logs=logs,
        environment={key: value for key, value in environment.items() if key not in SECRETS},
        new_id=new_id,
        now=time.time,
        strftime=time.strftime,
        run_in_thread=TextThreads(),
        grace=GracePeriods(),
        metrics=metrics,
        chance=Random,
        new_nonce=new_nonce,
        new_number=partial(next, _numbers(secrets.randbits(NUMBER_BITS))),
        spans=spans_of(cluster, name, environment, new_id, time.time, metrics.registry),
    )


def _warn_of_keys_without_tls(cluster: Cluster, credentials: Credentials) -> None:
    keys_wanted = credentials.keys is not None and credentials.keys.wanted
    if keys_wanted and credentials.client_tls is None and cluster.gateway.host not in LOOPBACK_HOSTS:
        log.warning("clients send their keys in the clear: there is no gateway.tls_certificate")


def new_nonce() -> bytes:
    """Return random bytes for a greeting."""
    return secrets.token_bytes(NONCE_BYTES)


def new_secret() -> str:
    """Return a random secret for links."""
    return secrets.token_hex(SECRET_BYTES)


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
    host = f"[{section.host}]" if ":" in section.host else section.host or "localhost"
    url = f"http{'s' * (assembly.gateway.port.tls is not None)}://{host}:{assembly.gateway.port.number}"
    key = "-H 'authorization: Bearer YOUR-KEY' " if assembly.gateway.keys.wanted else ""
    path, body = example_request(cluster)
    terminal.announce("")
    terminal.announce(f"Ready: {url}  models: {', '.join(cluster.model)}  (Ctrl-C drains and stops)")
    terminal.announce(f"Try:   curl -sN {key}{url}{path} -d '{body}'")
    terminal.announce("")
