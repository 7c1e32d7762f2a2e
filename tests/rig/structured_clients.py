"""Clients with structured output, pydantic-ai and langchain-openai: in an environment of their own.

`python -m tests.rig.structured_clients` makes it from `structured-clients.txt`, in `build/structured-clients/`: a minute
and 170 MB.
"""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

from bench.peers.install import install
from bench.rig.node import MODEL, ROOT
from tests.rig.client_scripts import lines_of

NAME, ENVIRONMENTS = "structured-clients", ROOT / "build"


@frozen
class Asked:
    """How the answers to one client for one type ended, the last one with its detail."""

    client: str
    type: str
    outcomes: list[str]
    detail: str


def make_environment() -> None:
    """Install the clients, if they are not there; raises `CalledProcessError` if a package cannot be had."""
    install(NAME, ENVIRONMENTS, Path(__file__).parent)


def ask_all(port: int) -> list[Asked]:
    """Ask the server at this port of loopback with each client for each type."""
    script = Path(__file__).with_name("ask_structured.py")
    return [Asked(**line) for line in lines_of(ENVIRONMENTS / NAME, script, port, MODEL)]


if __name__ == "__main__":
    make_environment()
