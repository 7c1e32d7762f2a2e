"""SGLang's own HTTP server, 0.5.23, alone and behind SMG 1.13.0, the gateway that grew out of SGLang's router."""

from __future__ import annotations

from bench.peers import cpu_sglang
from bench.peers.peer import Command, Peer, Setup
from bench.rig.node import free_ports


def server(setup: Setup, name: str, port: int) -> Command:
    """Return the command of one server.

    It is told to freeze its objects once it is ready: its own call comes before it listens and fails where the warm-up
    is skipped, and without it a full collection stops the server for half a second now and then.
    """
    words = (setup.python("sglang"), "-m", "sglang.launch_server", *cpu_sglang.flags(setup))
    where = ("--host", "127.0.0.1", "--port", str(port))
    return Command(name, (*words, *where), cpu_sglang.VARIABLES, posts=(f"http://127.0.0.1:{port}/freeze_gc",))


def behind_smg(setup: Setup) -> list[Command]:
    """Return the commands of the gateway and of the servers behind it, which it asks over HTTP."""
    *ports, metrics = free_ports(setup.workers + 1)
    servers = [server(setup, f"server-{number}", port) for number, port in enumerate(ports)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    words = ("-m", "smg", "launch", "--host", "127.0.0.1", "--port", str(setup.port), "--log-level", "warn")
    own = ("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics))
    gateway = Command("gateway", (setup.python("smg"), *words, *own, "--worker-urls", *urls))
    return [*servers, gateway]


PEERS = (
    Peer(
        name="sglang",
        title="SGLang 0.5.23, its own server",
        engine="sglang",
        environments=("sglang",),
        commands=lambda setup: [server(setup, "server", setup.port)],
    ),
    Peer(
        name="smg",
        title="SMG 1.13.0 before SGLang 0.5.23's own server",
        engine="sglang",
        environments=("smg", "sglang"),
        commands=behind_smg,
        workers_max=16,
    ),
)
