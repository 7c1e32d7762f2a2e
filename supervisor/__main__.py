"""`python -m supervisor cluster.toml [--check] [--node NAME]`, and `python -m supervisor hash-key [NAME]`."""

from __future__ import annotations

import argparse
import os
import sys
from getpass import getpass
from pathlib import Path

import trio

from protocol.errors import ActorError, StartFailed
from supervisor import check, config, node, say
from supervisor.doors import keys
from supervisor.version import version


def main() -> int:
    """Read the command line, and check a cluster or run a node of it, or hash a key; return the exit code."""
    if sys.argv[1:2] == ["hash-key"]:
        return hash_key(sys.argv[2] if sys.argv[2:] else "NAME")
    parser = argparse.ArgumentParser(
        prog="python -m supervisor",
        description="Serve language models by a tree of actors.",
        epilog="`python -m supervisor hash-key [NAME]` reads a secret and prints the lines that let it in as NAME.",
    )
    parser.add_argument("file", type=Path, help="a cluster.toml")
    parser.add_argument(
        "--check", action="store_true", help="print the tree and every limit, or every mistake; start nothing"
    )
    parser.add_argument("--node", help="the node to run, where the file has several")
    parser.add_argument("--version", action="version", version=f"espalier {version()}")
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


def hash_key(name: str) -> int:
    """Read a secret from the standard input, and print the lines that make a file of keys know it by `name`."""
    secret = getpass("secret: ") if sys.stdin.isatty() else sys.stdin.readline().rstrip("\r\n")
    try:
        print(keys.line(name, secret))
    except StartFailed as error:
        print(f"espalier: {error}", file=sys.stderr)
        return 1
    if len(secret) < keys.SECRET_CHARACTERS_GOOD:
        print(f"espalier: a secret of {len(secret)} characters can be guessed; take a long one", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
