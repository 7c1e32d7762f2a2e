"""Stock clients that offer tools, openai, openai-agents, langchain-openai and pydantic-ai: in an environment of their own.

`python -m tests.rig.tool_clients` makes it from `tool-clients.txt`, in `build/tool-clients/`: a minute and 200 MB.
"""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

from bench.peers.install import install
from bench.rig.node import MODEL, ROOT
from tests.rig.client_scripts import lines_of

NAME, ENVIRONMENTS = "tool-clients", ROOT / "build"


@frozen
class Ran:
    """What a client did: the cities that it ran its tool for, and its answer or error."""

    client: str
    asked: str
    streamed: bool
    cities: list[str]
    answer: str


def make_environment() -> None:
    """Install the clients, if they are not there; raises `CalledProcessError` if a package cannot be had."""
    install(NAME, ENVIRONMENTS, Path(__file__).parent)


def ask_all(port: int) -> list[Ran]:
    """Have each client ask the server at this port of loopback."""
    script = Path(__file__).with_name("ask_tools.py")
    return [Ran(**line) for line in lines_of(ENVIRONMENTS / NAME, script, port, MODEL)]


if __name__ == "__main__":
    make_environment()
