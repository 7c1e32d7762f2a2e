"""The commands `status`, `drain`, `restart`, `reload` and `engine` for an operator's shell.

A command reads the cluster's file like a node, but a mistake in the file must not keep an operator from a running
cluster: nodes of this machine are then found by their run folders, and asked by their sockets. Text from nodes is
printed without control characters.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import trio
from rich.console import Console
from rich.live import Live

from actors.kit.groups import consists_of, first_leaf, first_of
from protocol.errors import EspalierError, StartFailed
from protocol.messages.cluster import Reload, Reloaded, Status
from supervisor.cli import drain, engine, status_view
from supervisor.cli.client import FAST_POLL_S, ClusterClient
from supervisor.cli.output import CommandConsole, print_sentence
from supervisor.cli.status_view import StatusOrError
from supervisor.cluster import link_credentials
from supervisor.config import load
from supervisor.config.schema import Cluster
from supervisor.config.sections import NodeSection
from supervisor.control import unix_socket
from supervisor.engines.kinds import read_cluster
from supervisor.processes import run_folder
from supervisor.telemetry import logs

POLL_S = 1.0  # the time between two polls of `--watch`
NEEDS_FILE = ("reload", "restart")  # the commands after which nodes use the present file
NEW_NODE_WAIT_S = 20.0  # the longest wait for the answer of a new node


# Commands ------------------------------------------------------------------------------


def main(arguments: list[str], environment: Mapping[str, str], new_nonce: Callable[[], bytes]) -> int:
    """Run one command and return its exit code; raises `StartFailed` if the file is unusable."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options, environment, new_nonce)
    except BaseExceptionGroup as group:  # the error within the nurseries around it
        error = _cause(group)
        if error is group:
            raise
    except (KeyboardInterrupt, OSError) as raised:
        error = raised
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, OSError):
        return logs.exit_code_of_failed_write(error)
    raise error


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the cause of a command's end: Ctrl-C, a failed write or an error; the group itself if it has a bug."""
    if (interrupt := first_of(group, KeyboardInterrupt)) is not None:
        return interrupt
    if not consists_of(group, OSError, EspalierError):
        return group
    return first_of(group, OSError) or first_leaf(group)


def _run(options: argparse.Namespace, environment: Mapping[str, str], new_nonce: Callable[[], bytes]) -> int:
    """Run one command, and return its exit code."""
    console = CommandConsole(highlight=False, soft_wrap=False)
    folders = _folders(options.file, options.pid)
    needs_file = options.command in NEEDS_FILE

    def new_client(cluster: Cluster, folders: Mapping[str, Path]) -> ClusterClient:
        # Without a file, nodes are reached by their sockets alone, which need no secret.
        secret = link_credentials.cluster_secret(cluster, environment) if cluster.model else b""
        tls = link_credentials.link_tls(cluster)
        return ClusterClient(cluster, secret, tls, new_nonce, folders, partial(_folders_now, options.file, options.pid))

    use_broken_file = options.command == "reload"  # keys are reloaded in any case
    client, wrong = make_client(options.file, folders, new_client, use_broken_file=use_broken_file)
    if wrong and needs_file:
        for line in wrong.split("\n"):  # a mistake each
            print_sentence(console, line)
        if not use_broken_file:
            print_sentence(console, f"Node {options.node} is not drained: it could not start with this file.")
            return 1
    elif wrong:  # on the standard error stream, since a program reads the other
        first, *_ = wrong.splitlines()
        notice = f"{first.rstrip(':')} (--check has the details); nodes that run here are asked all the same"
        print_sentence(CommandConsole(stderr=True, highlight=False), notice)
    if not folders and all(node.listen is None for node in client.cluster.node.values()):
        raise StartFailed(
            "no node of this cluster listens, and none runs here below the temporary folder of this command"
            f" ({run_folder.base_folder()}) as the same user, so none can be asked"
        )
    run: Callable[[], Awaitable[int]]
    match options.command:
        case "status":
            run = partial(print_status, client, console, as_json=options.json, watch=options.watch)
        case "drain" | "restart" as command:
            run = partial(drain.COMMANDS[command], client, console, options.node)
        case "engine":
            request = engine.read_request(options)
            to = options.to if "to" in options else Path()  # of an operation that saves a file
            run = partial(engine.operate, client, console, options.engine, request, to)
        case _:
            run = partial(reload_nodes, client, console)
    code: int = trio.run(run, strict_exception_groups=True)
    return 1 if wrong and needs_file else code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m supervisor", description="Observe or change a running cluster.")
    parser.add_argument("file", metavar="FILE", type=Path, help="its cluster.toml")
    every = argparse.ArgumentParser(add_help=False)
    every.add_argument(
        "--pid", type=int, help="the process of the node, if a node of this file runs twice on this machine"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    status = commands.add_parser("status", parents=[every], help="every node's tree, engines and links")
    status.add_argument("--json", action="store_true", help="for programs")
    status.add_argument("--watch", action="store_true", help="repeat every second until Ctrl-C")
    drains = commands.add_parser(
        "drain", parents=[every], help="let a node finish its requests and exit; waits until it has gone"
    )
    drains.add_argument("node", help="its name; that of a gateway's node means all of its processes")
    restarts = commands.add_parser(
        "restart",
        parents=[every],
        help="drain a node and have its launcher start it again, unless the file is wrong; waits until it is up",
    )
    restarts.add_argument("node", help="its name; the processes of a gateway's node are restarted one after the other")
    engines = commands.add_parser("engine", parents=[every], help="have an engine carry out an operation")
    engine.add_operations(engines)
    commands.add_parser("reload", parents=[every], help="let every node read its file again")
    return parser


def _folders(file: Path, pid: int | None) -> dict[str, Path]:
    """Return the run folders of the file's nodes on this host, by node; raises `StartFailed` if one runs twice."""
    folders: dict[str, Path] = {}
    for running in unix_socket.running_nodes(run_folder.base_folder(), file):
        name = running.node
        if pid not in {None, running.pid}:
            continue
        if name in folders:
            raise StartFailed(
                f"node {name} of {file} runs here more than once; name one by --pid, such as {running.pid}"
            )
        folders[name] = Path(running.folder)
    return folders


def _folders_now(file: Path, pid: int | None) -> dict[str, Path]:
    """Return the same later; none while a node runs twice, as one that is started again may for a moment."""
    with suppress(StartFailed):
        return _folders(file, pid)
    return {}


def make_client(
    file: Path,
    folders: Mapping[str, Path],
    new_client: Callable[[Cluster, Mapping[str, Path]], ClusterClient],
    *,
    use_broken_file: bool,
) -> tuple[ClusterClient, str]:
    """Return a client for the cluster, and the mistakes in its file, if nodes can be asked all the same.

    Raises `StartFailed` if the file is wrong and no node runs here, unless `use_broken_file` allows the nodes of a file
    with mistakes.
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


async def reload_nodes(client: ClusterClient, console: Console) -> int:
    """Ask every node to read its file again, wait for new nodes, and return the exit code."""
    statuses: Mapping[str, StatusOrError] = await client.poll()
    code, starts = 0, set[str]()
    for name in [name for name, status in statuses.items() if isinstance(status, Status)]:
        try:
            reloaded = await client.ask(name, Reload(name))
        except EspalierError as error:
            print_sentence(console, f"{name}: {error}")
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
            print_sentence(console, f"{name}: it runs now")
        else:
            print_sentence(console, f"{name}: not asked: {status}")
            code = 1
    return code


async def _wait_for(
    client: ClusterClient, statuses: Mapping[str, StatusOrError], starts: Collection[str]
) -> Mapping[str, StatusOrError]:
    """Return the statuses once all starting nodes have answered, after `NEW_NODE_WAIT_S` at the latest."""
    with trio.move_on_after(NEW_NODE_WAIT_S):
        while any(isinstance(statuses.get(name), str) for name in starts):
            await trio.sleep(FAST_POLL_S)
            statuses = await client.poll()
    return statuses
