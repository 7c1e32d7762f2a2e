"""The commands `status`, `drain` and `reload`, which an operator runs in a shell.

A command reads the cluster's file like a node, but a mistake in the file must not keep an operator from a cluster
that runs: nodes of this machine are then found by their run folders, and asked by their sockets. Text from nodes is
printed only without characters that could control the terminal.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import trio
from rich.console import Console
from rich.live import Live

from protocol.cluster import Drain, GetStatus, Reload, Reloaded, Status
from protocol.errors import EspalierError, PeerLost, StartFailed
from supervisor.cli import status_view
from supervisor.cli.client import ClusterClient, has_link_to, nothing_listens
from supervisor.cli.status_view import StatusOrError
from supervisor.cluster import link_credentials
from supervisor.config import load
from supervisor.config.schema import Cluster, NodeSection
from supervisor.control import unix_socket
from supervisor.engines.kinds import read_cluster
from supervisor.printable import printable
from supervisor.telemetry import logs

POLL_S = 1.0  # between two polls of `--watch`
FAST_POLL_S = 0.25  # the same, of a node that drains or starts
NEW_NODE_WAIT_S = 20.0  # for a node that its launcher starts to answer


# Commands ------------------------------------------------------------------------------


class _Console(Console):
    """A console that reports a closed output as `BrokenPipeError`."""

    def on_broken_pipe(self) -> None:
        """Raise the error, where the library would exit with 1."""
        raise BrokenPipeError


def main(arguments: list[str], environment: Mapping[str, str], new_nonce: Callable[[], bytes]) -> int:
    """Run one command and return its exit code; raises `StartFailed` if the file is unusable."""
    parser = argparse.ArgumentParser(prog="python -m supervisor", description="Observe or change a running cluster.")
    parser.add_argument("file", type=Path, help="its cluster.toml")
    every = argparse.ArgumentParser(add_help=False)
    every.add_argument(
        "--pid", type=int, help="the process of the node, if a node of this file runs twice on this machine"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    status = commands.add_parser("status", parents=[every], help="every node's tree, engines and links")
    status.add_argument("--json", action="store_true", help="for programs")
    status.add_argument("--watch", action="store_true", help="repeat every second until Ctrl-C")
    drain = commands.add_parser(
        "drain", parents=[every], help="let a node finish its requests and exit; waits until it has gone"
    )
    drain.add_argument("node")
    commands.add_parser("reload", parents=[every], help="let every node read its file again")
    options = parser.parse_args(arguments)
    console = _Console(highlight=False, soft_wrap=False)
    folders = _folders(options.file, options.pid)
    reloads = options.command == "reload"  # keys are reloaded in any case

    def new_client(cluster: Cluster, folders: Mapping[str, Path]) -> ClusterClient:
        # Without a file, nodes are reached by their sockets alone, which ask for no secret.
        secret = link_credentials.cluster_secret(cluster, environment) if cluster.model else b""
        return ClusterClient(cluster, secret, link_credentials.link_tls(cluster), new_nonce, folders)

    client, wrong = make_client(options.file, folders, new_client, use_broken_file=reloads)
    if wrong and reloads:
        for line in wrong.split("\n"):  # a mistake each
            _print(console, line)
    elif wrong:  # to the standard error stream, since a program reads the other
        first, *_ = wrong.splitlines()
        notice = f"{first.rstrip(':')} (--check tells more); nodes that run here are asked all the same"
        _print(_Console(stderr=True, highlight=False), notice)
    if not folders and all(node.listen is None for node in client.cluster.node.values()):
        raise StartFailed(
            "no node of this cluster listens, and none runs here below the temporary folder of this command"
            f" ({tempfile.gettempdir()}) as the same user, so none can be asked"
        )
    run: Callable[[], Awaitable[int]]
    match options.command:
        case "status":
            run = partial(print_status, client, console, as_json=options.json, watch=options.watch)
        case "drain":
            run = partial(drain_node, client, console, options.node)
        case _:
            run = partial(reload_nodes, client, console)
    try:
        code: int = trio.run(run, strict_exception_groups=True)
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        return logs.exit_code_of_failed_write(error)
    return 1 if wrong and reloads else code


def _folders(file: Path, pid: int | None) -> dict[str, Path]:
    """Return the run folders of the file's nodes on this host, by node; raises `StartFailed` if one runs twice."""
    folders: dict[str, Path] = {}
    for running in unix_socket.running_nodes(Path(tempfile.gettempdir()), file):
        name = running.node
        if pid not in {None, running.pid}:
            continue
        if name in folders:
            raise StartFailed(
                f"node {name} of {file} runs here more than once; name one by --pid, such as {running.pid}"
            )
        folders[name] = Path(running.folder)
    return folders


def make_client(
    file: Path,
    folders: Mapping[str, Path],
    new_client: Callable[[Cluster, Mapping[str, Path]], ClusterClient],
    *,
    use_broken_file: bool,
) -> tuple[ClusterClient, str]:
    """Return a client for the cluster, and the mistakes in its file, in spite of which nodes that run here are asked.

    Raises `StartFailed` if the file is wrong and none runs here, unless `use_broken_file` allows to ask the nodes that
    a file with mistakes describes.
    """
    described: Cluster | None
    wrong: StartFailed
    try:
        described = read_cluster(file)
        return new_client(described, folders), ""
    except load.FileMistakes as error:
        described, wrong = error.cluster if folders or use_broken_file else None, error
    except StartFailed as error:  # not a cluster's file, or its secret or certificates cannot be used
        described, wrong = None, error
    if described is not None:
        with suppress(StartFailed):
            return new_client(described, folders), str(wrong)
    if not folders:
        raise wrong
    local = Cluster(model={}, engine={}, node={name: NodeSection() for name in folders})
    return new_client(local, folders), str(wrong)


async def print_status(client: ClusterClient, console: Console, *, as_json: bool, watch: bool) -> int:
    """Print the status of every node, again and again with `watch`; return the exit code."""
    name = client.cluster.cluster.name
    if as_json:
        while True:
            statuses = await client.poll()
            sys.stdout.write(json.dumps(as_json_object(name, statuses)) + "\n")
            sys.stdout.flush()
            if not watch:
                return _exit_code(statuses)
            await trio.sleep(POLL_S)
    statuses = await client.poll()
    if not watch:
        console.print(status_view.render_status(name, statuses))
        return _exit_code(statuses)
    if not console.is_terminal:
        while True:
            console.print(status_view.render_status(name, statuses))
            await trio.sleep(POLL_S)
            statuses = await client.poll()
    first = status_view.render_status(name, statuses)
    with Live(first, console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            await trio.sleep(POLL_S)
            live.update(status_view.render_status(name, await client.poll()), refresh=True)


def as_json_object(name: str, statuses: Mapping[str, StatusOrError]) -> dict[str, object]:
    """Return the statuses of a cluster as plain values, for JSON."""
    nodes = {
        node: {"unreachable": status} if isinstance(status, str) else msgspec.to_builtins(status)
        for node, status in statuses.items()
    }
    return {"cluster": name, "nodes": nodes}


def _exit_code(statuses: Mapping[str, StatusOrError]) -> int:
    """Return 0 if every node has answered, else 1."""
    return int(any(isinstance(status, str) for status in statuses.values()))


async def drain_node(client: ClusterClient, console: Console, name: str) -> int:
    """Ask a node to drain, wait until it has gone, and return the exit code."""
    statuses = await client.poll()
    before = statuses.get(name)
    if name not in statuses:
        _print(console, f"There is no node {name}; there is {', '.join(statuses)}.")
        return 1
    if not isinstance(before, Status):
        _print(
            console,
            f"Node {name} cannot be asked: {before}. If it runs, end it by SIGTERM on its host, which drains it too.",
        )
        return 1
    await client.ask(name, Drain(name))
    _print(console, f"Node {name} drains: it gets nothing new, and its streams finish or move to other nodes.")
    printed = -1
    while True:
        await trio.sleep(FAST_POLL_S)
        status = await _poll_node(client, name)
        if status is None:
            _print(console, f"Node {name} has gone.")
            return 0
        if status.run != before.run:
            _print(console, f"Node {name} has gone, and runs again.")
            return 0
        running = sum(offer.running + offer.waiting for offer in status.state.offers)
        if running != printed:
            _print(console, f"  {running} request{'s run' if running != 1 else ' runs'} on it")
            printed = running


async def _poll_node(client: ClusterClient, name: str) -> Status | None:
    """Return the status of a node that has answered before, None once it is gone: nothing listens, or no link is left.

    Raises `PeerLost` if no node is left whose links could tell.
    """
    through = client.routes[name]
    direct = through == client.route(name)
    while True:
        client.routes.setdefault(name, through)  # a poll without its answer has removed its route
        try:
            status = await client.ask(name, GetStatus(name))
            return status if isinstance(status, Status) else None
        except EspalierError as error:
            cause = error
        if direct and nothing_listens(cause):  # the machine is there, and the node is not
            return None
        if not direct:
            statuses = await client.poll()
            if isinstance(found := statuses.get(name), Status):
                return found
            if not client.routes:
                raise PeerLost(f"no node answers any more, so it is not known whether {name} has gone") from cause
            if not any(has_link_to(status, name) for status in statuses.values()):
                return None
        await trio.sleep(FAST_POLL_S)


async def reload_nodes(client: ClusterClient, console: Console) -> int:
    """Ask every node to read its file again, wait for new nodes, and return the exit code."""
    statuses: Mapping[str, StatusOrError] = await client.poll()
    code, starts = 0, set[str]()
    for name in [name for name, status in statuses.items() if isinstance(status, Status)]:
        try:
            reloaded = await client.ask(name, Reload(name))
        except EspalierError as error:
            _print(console, f"{name}: {error}")
            code = 1
            continue
        if isinstance(reloaded, Reloaded):
            console.print(status_view.render_reload(name, reloaded), soft_wrap=True)
            starts.update(reloaded.starts)
            code = 1 if reloaded.refused else code
    missing = [name for name, status in statuses.items() if isinstance(status, str)]
    statuses = await _wait_for(client, statuses, starts.intersection(missing))
    for name in missing:
        status = statuses.get(name, "it has left the cluster")
        if isinstance(status, Status):
            _print(console, f"{name}: it runs now")
        else:
            _print(console, f"{name}: not asked: {status}")
            code = 1
    return code


async def _wait_for(
    client: ClusterClient, statuses: Mapping[str, StatusOrError], starts: Collection[str]
) -> Mapping[str, StatusOrError]:
    """Return the statuses once all nodes that start have answered, after `NEW_NODE_WAIT_S` at the latest."""
    with trio.move_on_after(NEW_NODE_WAIT_S):
        while any(isinstance(statuses.get(name), str) for name in starts):
            await trio.sleep(FAST_POLL_S)
            statuses = await client.poll()
    return statuses


def _print(console: Console, text: str) -> None:
    """Print a sentence that may contain text from nodes."""
    console.print(printable(text), markup=False, emoji=False, soft_wrap=True)
