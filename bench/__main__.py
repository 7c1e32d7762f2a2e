"""`python -m bench COMMAND`: measurements of any OpenAI-compatible server."""

from __future__ import annotations

import argparse
import sys

from bench.load import command, options


def main(words: list[str]) -> int:
    """Run the command of the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    load = commands.add_parser(
        "load",
        help="send requests to any OpenAI-compatible server and measure its answers",
        description=options.DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add(load)
    arguments = parser.parse_args(words)
    return command.main(load, arguments, words[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
