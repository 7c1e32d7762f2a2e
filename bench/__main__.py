"""`python -m bench COMMAND`: measurements of this server and of any other that speaks OpenAI's APIs."""

from __future__ import annotations

import argparse
import signal
import sys
from importlib import import_module
from pathlib import Path

from bench.rig import result

# A module with `DESCRIPTION`, `add(parser)` and `main(parser, arguments, words)`, imported when its command is chosen.
COMMANDS = {
    "load": ("bench.load.command", "send requests to any OpenAI-compatible server and measure its answers"),
    "cost": ("bench.cost.command", "measure what a token and a request cost a server: CPU, context switches, memory"),
    "versus": ("bench.versus.command", "compare this server with another, both with the same engine"),
    "turns": ("bench.turns.command", "grow agents' sessions and measure what each of their turns costs a server"),
    "stages": ("bench.stages.command", "measure each stage of a token's and a request's way through this code"),
    "report": ("bench.report.command", "one page of Markdown from the JSON documents of any command"),
    "peers": ("bench.peers.command", "install and start other servers, to compare with"),
}


def main(words: list[str]) -> int:
    """Run the command of the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        if words[:1] == [name]:
            chosen = import_module(module)
            command.description = chosen.DESCRIPTION
            chosen.add(command)
            arguments = parser.parse_args(words)
            _check_writable(command, arguments)
            result.surroundings()
            return int(chosen.main(command, arguments, words[1:]))
    parser.parse_args(words)
    return 0


def _check_writable(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse a command line whose results could not be written."""
    for name in ("json", "raw"):
        path: Path | None = getattr(arguments, name, None)
        if path is not None:
            try:
                result.check_writable(path)
            except OSError as error:
                parser.error(f"--{name}: {path}: {error.strerror}")


if __name__ == "__main__":
    # As Ctrl-C does: what a command has started ends with it.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main(sys.argv[1:]))
