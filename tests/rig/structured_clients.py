"""Clients with structured output, pydantic-ai and langchain-openai: in an environment of their own.

`python -m tests.rig.structured_clients` makes it from `structured-clients.txt`, in `build/structured-clients/`: a minute
and 170 MB.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from attrs import frozen

from bench.peers.install import install
from bench.rig.node import MODEL, ROOT

NAME, ENVIRONMENTS = "structured-clients", ROOT / "build"
RUN_WITHIN_S = 300.0


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
    done = subprocess.run(
        [
            str(ENVIRONMENTS / NAME / "bin" / "python"),
            str(Path(__file__).with_name("ask_structured.py")),
            *(f"http://127.0.0.1:{port}/v1", MODEL),
        ],
        env={**os.environ, "LANGSMITH_TRACING": "false", "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=RUN_WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [Asked(**json.loads(line)) for line in done.stdout.splitlines()]


if __name__ == "__main__":
    make_environment()
