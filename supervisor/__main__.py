"""`python -m supervisor cluster.toml [--check] [--node NAME]`."""

from __future__ import annotations

import argparse
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import trio

from protocol.errors import ActorError
from supervisor import check, config, node, say


def main() -> int:
    """Read the command line, and check a cluster or run a node of it; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m supervisor", description="Serve language models by a tree of actors."
    )
    parser.add_argument("file", type=Path, help="a cluster.toml")
    parser.add_argument(
        "--check", action="store_true", help="print the tree and every limit, or every mistake; start nothing"
    )
    parser.add_argument("--node", help="the node to run, where the file has several")
    parser.add_argument("--version", action="version", version=f"espalier {_version()}")
    arguments = parser.parse_args()
    try:
        cluster = config.read(arguments.file)
        name = check.pick(cluster, arguments.node)
        if arguments.check:
            print(check.text(cluster, name, os.environ))
            return 0
        check.ahead(cluster, name)
        return trio.run(node.run, cluster, name, say.set_up(), dict(os.environ), strict_exception_groups=True)
    except ActorError as error:
        print(f"espalier: {error}", file=sys.stderr)
        return 1


def _version() -> str:
    try:
        return version("espalier")
    except PackageNotFoundError:  # run from a checkout
        return "0.1.0"


if __name__ == "__main__":
    sys.exit(main())
