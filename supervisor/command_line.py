"""The command line: `python -m supervisor cluster.toml [--check] [--node NAME]`, `... COMMAND`, `hash-key`.

Mistakes found before anything runs (in the file, the placement, the limits of this host) end the process here with a
sentence for the operator. From `_run` on, output goes through the queued log, so that nothing waits for its reader.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import signal
import stat
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from getpass import getpass
from pathlib import Path
from random import SystemRandom

import trio

from protocol.errors import ActorError, EspalierError, StartFailed
from protocol.strict.mistakes import Mistake
from supervisor.cluster import link_credentials
from supervisor.config import load, placement
from supervisor.config.schema import Cluster
from supervisor.engines.kinds import load_cluster
from supervisor.gateway.keys import key_sources
from supervisor.launcher import launcher, preflight
from supervisor.launcher.parent_pipe import ParentPipe
from supervisor.node import descriptor_needs, garbage, preview, start
from supervisor.node.reload import file_checks
from supervisor.printable import printable
from supervisor.processes import reaper, signals
from supervisor.supervision.status import EarlierFailures
from supervisor.telemetry import logs
from supervisor.version import version

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "supervisor")
OPERATOR_COMMANDS = ("status", "drain", "restart", "reload", "engine")


def main() -> int:
    """Parse the command line; check a cluster, run nodes of it, or hash a key. Return the exit code.

    A caller blocks SIGHUP to keep it pending until a node or a launcher has its handlers.
    """
    # Folders and files of this process must be its own user's to use, whatever the umask leaves to others.
    os.umask(os.umask(stat.S_IRWXG | stat.S_IRWXO) & ~stat.S_IRWXU)
    if sys.argv[1:2] == ["hash-key"]:
        signals.accept_hang_up()
        return hash_key(sys.argv[2] if sys.argv[2:] else "NAME")
    if sys.argv[2:3] and sys.argv[2] in OPERATOR_COMMANDS:
        signals.accept_hang_up()
        return run_operator_command(sys.argv[1:])
    parser = argparse.ArgumentParser(
        prog="python -m supervisor",
        description="Serve language models by a tree of actors.",
        epilog="`python -m supervisor cluster.toml status | drain NODE | restart NODE | reload | engine NAME OPERATION`"
        " asks a running cluster; `python -m supervisor hash-key [NAME]` reads a secret and prints the lines of a key"
        " file for NAME.",
    )
    parser.add_argument("file", type=Path, help="a cluster.toml")
    parser.add_argument(
        "--check", action="store_true", help="print the tree and every limit, or every mistake; start nothing"
    )
    parser.add_argument("--node", help="the one node to run; without it, all that the file places on this host")
    parser.add_argument(
        "--join", metavar="HOST:PORT", action="append", default=[], help="where a node of a running cluster listens"
    )
    # A launcher's arguments: the descriptor of its pipe, its restarts of the node, and the reason of the last one.
    parser.add_argument("--launched", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--restarts", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--ended-by", default="", help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=f"espalier {version()}")
    arguments = parser.parse_args()
    parent = None if arguments.launched is None else ParentPipe(arguments.launched)
    if parent is not None:
        os.set_inheritable(parent.fd, False)
        reaper.exit_if_orphaned(parent.fd)
        faulthandler.register(signal.SIGQUIT, file=parent.fd, all_threads=True)  # sent to a node that hangs
    descriptor_needs.raise_limit()
    try:
        if arguments.check:
            signals.accept_hang_up()
            return _print(check_report(arguments.file, arguments.join, arguments.node))
        examine = partial(file_checks.mistakes, environment=os.environ, node=arguments.node)
        loaded = load_cluster(arguments.file, arguments.join, examine)
        names = placement.select_nodes(loaded.cluster, arguments.node)
        preflight.check_can_start(loaded.cluster, *names)
    except ActorError as error:
        if parent is None:
            print(f"espalier: {error}", file=sys.stderr)
        else:
            parent.send("failed", str(error))
            parent.flush(logs.FLUSH_S)
        return 1
    earlier = EarlierFailures(arguments.restarts, arguments.ended_by)
    return _run(loaded, names, parent, earlier)


def _run(loaded: load.Loaded, names: tuple[str, ...], parent: ParentPipe | None, earlier: EarlierFailures) -> int:
    """Run nodes of a cluster and return the exit code; from here on nothing waits for a reader of the log."""
    nodes = loaded.cluster.node
    node_name = names[0] if len(names) == 1 and len(nodes) > 1 else None
    terminal = logs.configure_logging(node=node_name)
    logs.log_interpreter_warnings()
    garbage.prepare()
    try:
        run = _run_function(loaded, names, terminal, parent, earlier)
        with loaded.locating_mistakes():
            code: int = trio.run(run, strict_exception_groups=True)
    except ActorError as error:
        if parent is None:
            terminal.report_failure(str(error))
        else:
            parent.send("failed", str(error))
        return 1
    except Exception:  # a traceback that Python prints by itself would wait for its reader
        log.critical("a bug ended the process", exc_info=True)
        return 1
    else:
        if parent is not None:
            parent.send("done")
        return code
    finally:
        if parent is not None:
            parent.flush(logs.FLUSH_S)
        terminal.flush()


def _print(text: str) -> int:
    """Print a text and return the exit code; raises `StartFailed` if it cannot be written, such as to a full disk."""
    try:
        print(text, flush=True)
    except OSError as error:
        return logs.exit_code_of_failed_write(error)
    return 0


def check_report(file: Path, joined: Sequence[str], node_name: str | None) -> str:
    """Return the output of `--check`: each node, then warnings; raises `StartFailed` for mistakes."""

    def examine(cluster: Cluster) -> Iterator[Mistake]:
        yield from file_checks.mistakes(cluster, os.environ, node_name)
        yield from file_checks.expired(cluster, time.time())

    loaded = load_cluster(file, joined, examine)
    cluster = loaded.cluster
    names = tuple(cluster.node) if node_name is None else placement.select_nodes(cluster, node_name)
    with loaded.locating_mistakes():
        trees = [preview.describe_node(cluster, name, os.environ) for name in names]
    warnings = [f"warning: {sentence}" for sentence in file_checks.warnings(cluster, time.time())]
    return "\n\n".join([*trees, *(["\n".join(warnings)] if warnings else [])])


def _run_function(
    loaded: load.Loaded,
    names: tuple[str, ...],
    terminal: logs.Terminal,
    parent: ParentPipe | None,
    earlier: EarlierFailures,
) -> Callable[[], Awaitable[int]]:
    """Return the function that runs one node in this process, or a launcher of several."""
    environment = dict(os.environ)
    if len(names) > 1:
        joins = [word for address in loaded.joined for word in ("--join", address)]
        command = (*COMMAND, str(loaded.file), *joins)
        environment |= link_credentials.start_secret(loaded.cluster, environment, start.new_secret())
        return launcher.Launcher(loaded, names, command, environment, terminal, SystemRandom()).run
    (name,) = names
    if parent is None:
        return partial(start.run, loaded, name, terminal, environment)
    terminal.announce_to_parent = partial(parent.send, "announce")
    send = parent.send

    def restart(wanted: bool) -> None:
        send("restart" if wanted else "stay")

    up, reload, done = partial(send, "up"), partial(send, "reload"), partial(send, "done")
    launched = start.LauncherHooks(up, reload, restart, parent.heartbeat, earlier, done)
    return partial(start.run, loaded, name, terminal, environment, launched)


def run_operator_command(arguments: list[str]) -> int:
    """Run one of the commands for a running cluster and return the exit code."""
    from supervisor.cli import commands  # noqa: PLC0415  # a node must not load the libraries of terminals

    try:
        return commands.main(arguments, os.environ, start.new_nonce)
    except EspalierError as error:
        print("\n".join(map(printable, f"espalier: {error}".split("\n"))), file=sys.stderr)
        return 1


def hash_key(name: str) -> int:
    """Read a secret from the standard input and print its lines for a key file, under `name`."""
    secret = getpass("secret: ") if sys.stdin.isatty() else sys.stdin.readline().rstrip("\r\n")
    try:
        code = _print(key_sources.key_file_lines(name, secret))
    except StartFailed as error:
        print(f"espalier: {error}", file=sys.stderr)
        return 1
    if len(secret) < key_sources.SECRET_CHARACTERS_GOOD:
        print(f"espalier: a secret of {len(secret)} characters can be guessed; take a long one", file=sys.stderr)
    return code
