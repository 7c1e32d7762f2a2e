"""What an operator does from a shell: look at a running cluster, drain a node of it, have its file read anew."""

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
from protocol.errors import (
    EspalierError,
    PeerLost,
    StartFailed,
)
from supervisor.cli import status_view
from supervisor.cli.client import ClusterClient, has_link_to, nothing_listens
from supervisor.cli.status_view import Seen
from supervisor.cluster import link_credentials
from supervisor.config import load
from supervisor.config.load import Cluster, NodeSection
from supervisor.control import unix_socket
from supervisor.engines.kinds import read_cluster
from supervisor.printable import printable
from supervisor.telemetry import logs

LOOKS_S = 1.0  # between two looks
DRAINS_S = 0.25  # the same, at a node that drains or starts
STARTS_S = 20.0  # for a node that its launcher starts to answer


# Commands ------------------------------------------------------------------------------


class _Console(Console):
    """A console that leaves it to the command what follows when nobody reads any more."""

    def on_broken_pipe(self) -> None:
        """Raise it, where the library would exit with 1."""
        raise BrokenPipeError


def main(arguments: list[str], environment: Mapping[str, str], new_nonce: Callable[[], bytes]) -> int:
    """Do what the command line says, and return the exit code; raises `StartFailed` if the file is of no use."""
    parser = argparse.ArgumentParser(
        prog="python -m supervisor", description="Look at a running cluster, or change it."
    )
    parser.add_argument("file", type=Path, help="its cluster.toml")
    parser.add_argument(
        "--pid", type=int, help="of the node to ask, where one of the same file and name runs twice here"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    status = commands.add_parser("status", help="every node's tree, engines and links")
    status.add_argument("--json", action="store_true", help="for programs")
    status.add_argument("--watch", action="store_true", help="again and again, until Ctrl-C")
    drain = commands.add_parser("drain", help="let a node finish what runs, and end; waits until it has gone")
    drain.add_argument("node")
    commands.add_parser("reload", help="let every node read its file anew")
    given = parser.parse_args(arguments)
    console = _Console(highlight=False, soft_wrap=False)
    folders = _folders(given.file, given.pid)
    reloads = given.command == "reload"  # keys are reloaded in any case

    def way(cluster: Cluster, folders: Mapping[str, Path]) -> ClusterClient:
        secret = b"" if cluster.file == Path() else link_credentials.cluster_secret(cluster, environment)
        return ClusterClient(cluster, secret, link_credentials.link_tls(cluster), new_nonce, folders)

    operator, wrong = _way(given.file, folders, way, anyway=reloads)
    if wrong and reloads:
        _say(console, wrong)
    elif wrong:  # a program reads the other output
        first, *_ = wrong.splitlines()
        said = f"{first.rstrip(':')} (--check tells more); nodes that run here are asked all the same"
        _say(_Console(stderr=True, highlight=False), said)
    if not folders and all(node.listen is None for node in operator.cluster.node.values()):
        raise StartFailed(
            "no node of this cluster listens, and none runs here below the temporary folder of this command"
            f" ({tempfile.gettempdir()}) as the same user, so none can be asked"
        )
    run: Callable[[], Awaitable[int]]
    match given.command:
        case "status":
            run = partial(_status, operator, console, as_json=given.json, watch=given.watch)
        case "drain":
            run = partial(_drain, operator, console, given.node)
        case _:
            run = partial(_reload, operator, console)
    try:
        code: int = trio.run(run, strict_exception_groups=True)
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        return logs.exit_code_of_failed_write(error)
    return 1 if wrong and reloads else code


def _folders(file: Path, pid: int | None) -> dict[str, Path]:
    """Return the run folders of the file's nodes on this host, by node; raises `StartFailed` if one runs twice."""
    found: dict[str, Path] = {}
    for each in unix_socket.find(Path(tempfile.gettempdir()), file):
        if pid not in {None, each.pid}:
            continue
        if each.node in found:
            raise StartFailed(
                f"node {each.node} of {file} runs here more than once; name one by --pid, such as {each.pid}"
            )
        found[each.node] = Path(each.folder)
    return found


def _way(
    file: Path,
    folders: Mapping[str, Path],
    way: Callable[[Cluster, Mapping[str, Path]], ClusterClient],
    *,
    anyway: bool,
) -> tuple[ClusterClient, str]:
    """Return how nodes are asked, and what is wrong in their file: that keeps nobody from those that run here.

    Raises `StartFailed` if the file is wrong and none runs here, but not if `anyway` says that the others which it
    describes all the same are asked.
    """
    described: Cluster | None
    wrong: StartFailed
    try:
        described = read_cluster(file)
        return way(described, folders), ""
    except load.FileMistakes as error:
        described, wrong = error.cluster if folders or anyway else None, error
    except StartFailed as error:  # it is no file of a cluster, or its secret or its certificates are of no use
        described, wrong = None, error
    if described is not None:
        with suppress(StartFailed):
            return way(described, folders), str(wrong)
    if not folders:
        raise wrong
    here = Cluster(model={}, engine={}, node={name: NodeSection() for name in folders})
    return way(here, folders), str(wrong)


async def _status(operator: ClusterClient, console: Console, *, as_json: bool, watch: bool) -> int:
    name = operator.cluster.cluster.name
    if as_json:
        while True:
            seen = await operator.look()
            sys.stdout.write(json.dumps(as_json_object(name, seen)) + "\n")
            sys.stdout.flush()
            if not watch:
                return _whole(seen)
            await trio.sleep(LOOKS_S)
    seen = await operator.look()
    if not watch:
        console.print(status_view.board(name, seen))
        return _whole(seen)
    if not console.is_terminal:
        while True:
            console.print(status_view.board(name, seen))
            await trio.sleep(LOOKS_S)
            seen = await operator.look()
    with Live(status_view.board(name, seen), console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            await trio.sleep(LOOKS_S)
            live.update(status_view.board(name, await operator.look()), refresh=True)


def as_json_object(name: str, seen: Mapping[str, Seen]) -> dict[str, object]:
    """Return what was seen of a cluster as plain values, for JSON."""
    nodes = {
        node: {"unreachable": each} if isinstance(each, str) else msgspec.to_builtins(each)
        for node, each in seen.items()
    }
    return {"cluster": name, "nodes": nodes}


def _whole(seen: Mapping[str, Seen]) -> int:
    """Return 0 if every node has answered, else 1."""
    return int(any(isinstance(each, str) for each in seen.values()))


async def _drain(operator: ClusterClient, console: Console, name: str) -> int:
    seen = await operator.look()
    before = seen.get(name)
    if name not in seen:
        _say(console, f"There is no node {name}; there is {', '.join(seen)}.")
        return 1
    if not isinstance(before, Status):
        _say(
            console,
            f"Node {name} cannot be asked: {before}. If it runs, end it by SIGTERM on its host, which drains it too.",
        )
        return 1
    await operator.ask(name, Drain(name))
    _say(console, f"Node {name} drains: it gets nothing new, and its streams finish or move to other nodes.")
    said = -1
    while True:
        await trio.sleep(DRAINS_S)
        status = await _look_at(operator, name)
        if status is None:
            _say(console, f"Node {name} has gone.")
            return 0
        if status.run != before.run:
            _say(console, f"Node {name} has gone, and runs again.")
            return 0
        running = sum(offer.running + offer.waiting for offer in status.state.offers)
        if running != said:
            _say(console, f"  {running} request{'s run' if running != 1 else ' runs'} on it")
            said = running


async def _look_at(operator: ClusterClient, name: str) -> Status | None:
    """Return how a node is that has been seen before, None once it has gone: nobody is there, or no link to it.

    Raises `PeerLost` if nobody is left who could say so.
    """
    through = operator.routes[name]
    direct = through == operator.route(name)
    while True:
        operator.routes.setdefault(name, through)  # a look that did not see it has lost the way
        try:
            status = await operator.ask(name, GetStatus(name))
            return status if isinstance(status, Status) else None
        except EspalierError as error:
            why = error
        if direct and nothing_listens(why):  # the host is there, and the node is not
            return None
        if not direct:
            seen = await operator.look()
            if isinstance(found := seen.get(name), Status):
                return found
            if not operator.routes:
                raise PeerLost(f"no node answers any more, so nobody knows whether {name} has gone") from why
            if not any(has_link_to(each, name) for each in seen.values()):
                return None
        await trio.sleep(DRAINS_S)


async def _reload(operator: ClusterClient, console: Console) -> int:
    seen: Mapping[str, Seen] = await operator.look()
    code, starts = 0, set[str]()
    for name in [name for name, each in seen.items() if isinstance(each, Status)]:
        try:
            reloaded = await operator.ask(name, Reload(name))
        except EspalierError as error:
            _say(console, f"{name}: {error}")
            code = 1
            continue
        if isinstance(reloaded, Reloaded):
            console.print(status_view.reloaded(name, reloaded), soft_wrap=True)
            starts.update(reloaded.starts)
            code = 1 if reloaded.refused else code
    missing = [name for name, each in seen.items() if isinstance(each, str)]
    seen = await _wait_for(operator, seen, starts.intersection(missing))
    for name in missing:
        each = seen.get(name, "it has left the cluster")
        if isinstance(each, Status):
            _say(console, f"{name}: it runs now")
        else:
            _say(console, f"{name}: not asked: {each}")
            code = 1
    return code


async def _wait_for(operator: ClusterClient, seen: Mapping[str, Seen], starts: Collection[str]) -> Mapping[str, Seen]:
    """Return how the nodes are once those that start answer, or have not for too long."""
    with trio.move_on_after(STARTS_S):
        while any(isinstance(seen.get(name), str) for name in starts):
            await trio.sleep(DRAINS_S)
            seen = await operator.look()
    return seen


def _say(console: Console, text: str) -> None:
    """Print a sentence in which others may have had a say."""
    console.print(printable(text), markup=False, emoji=False, soft_wrap=True)
