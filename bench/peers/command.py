"""`python -m bench peers`: list, install and start the servers that others are compared with."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.peers.install import environment_names, install
from bench.peers.peer import ENVIRONMENTS, Setup
from bench.peers.running import NotStarted, missing_environments, started
from bench.peers.table import SERVERS
from bench.rig.node import free_port, short_folder

DESCRIPTION = """\
Other servers of language models, and this one, on this machine's CPU with the tiny model.
Each peer is installed into an environment of its own."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to a parser."""
    actions = parser.add_subparsers(dest="action", required=True)
    for name, text in {
        "list": "print the servers, and whether each is installed",
        "install": "make the environments of these names",
        "start": "run a server until Ctrl-C, and print its URL and its processes",
    }.items():
        action = actions.add_parser(name, help=text)
        action.add_argument("--environments", type=Path, default=ENVIRONMENTS, help="default: build/peers")
        if name == "install":
            action.add_argument("names", nargs="+", choices=environment_names(), metavar="NAME")
        if name == "start":
            action.add_argument("server", choices=SERVERS)


def main(_parser: argparse.ArgumentParser, arguments: argparse.Namespace, _words: Sequence[str]) -> int:
    """Carry out one action; return the exit code."""
    actions = {"list": list_all, "install": install_all, "start": start}
    return actions[arguments.action](arguments)


def list_all(arguments: argparse.Namespace) -> int:
    """Print every server."""
    setup = Setup(folder=Path(), port=0, environments=arguments.environments)
    for peer in SERVERS.values():
        missing = missing_environments(peer, setup)
        state = f"not installed: python -m bench peers install {' '.join(missing)}" if missing else "installed"
        print(f"{peer.name:<26}{peer.title:<52}{state}")
    return 0


def install_all(arguments: argparse.Namespace) -> int:
    """Install environments; print failed ones and return 1 if there are any."""
    code = 0
    for name in arguments.names:
        try:
            install(name, arguments.environments)
            print(f"{name} is installed in {arguments.environments / name}")
        except (subprocess.CalledProcessError, OSError) as error:
            print(f"{name} could not be installed: {error}", file=sys.stderr)
            code = 1
    return code


def start(arguments: argparse.Namespace) -> int:
    """Run a server until a signal comes."""
    with short_folder() as folder:
        setup = Setup(folder=folder, port=free_port(), environments=arguments.environments)
        try:
            with started(SERVERS[arguments.server], setup) as running:
                pids = " ".join(f"{name}={process.pid}" for name, process in running.roots.items())
                print(f"{running.url} model={running.model} {pids}", flush=True)
                # Blocked only once the server runs, which would inherit it.
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
                signal.sigwait({signal.SIGINT, signal.SIGTERM})
                running.stop()
        except NotStarted as error:
            print(error, file=sys.stderr)
            return 1
    return 0
