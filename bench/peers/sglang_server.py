"""SGLang's own HTTP server, 0.5.23."""

from __future__ import annotations

from bench.peers import cpu_sglang
from bench.peers.peer import Command, Peer, Setup


def server(setup: Setup, name: str, port: int) -> Command:
    """Return the command of one server.

    It is told to freeze its objects once it is ready: its own call comes before it listens and fails where the warm-up
    is skipped, and without it a full collection stops the server for half a second now and then.
    """
    words = (setup.python("sglang"), "-m", "sglang.launch_server", *cpu_sglang.flags(setup))
    where = ("--host", "127.0.0.1", "--port", str(port))
    return Command(name, (*words, *where), cpu_sglang.VARIABLES, posts=(f"http://127.0.0.1:{port}/freeze_gc",))


def commands(setup: Setup) -> list[Command]:
    """Return the command of one server."""
    return [server(setup, "server", setup.port)]


PEER = Peer(
    name="sglang",
    title="SGLang 0.5.23, its own server",
    engine="sglang",
    environments=("sglang",),
    commands=commands,
)
