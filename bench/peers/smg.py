"""SMG 1.13.0, the gateway that grew out of SGLang's router, before SGLang's own servers over HTTP."""

from __future__ import annotations

from bench.peers import sglang_server
from bench.peers.peer import Command, Peer, Setup
from bench.rig.node import free_ports


def commands(setup: Setup) -> list[Command]:
    """Return the commands of the gateway and of the servers behind it."""
    *ports, metrics = free_ports(setup.workers + 1)
    servers = [sglang_server.server(setup, f"server-{number}", port) for number, port in enumerate(ports)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    words = ("-m", "smg", "launch", "--host", "127.0.0.1", "--port", str(setup.port), "--log-level", "warn")
    own = ("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics))
    gateway = Command("gateway", (setup.python("smg"), *words, *own, "--worker-urls", *urls))
    return [*servers, gateway]


PEER = Peer(
    name="smg",
    title="SMG 1.13.0 before SGLang 0.5.23's own server",
    engine="sglang",
    environments=("smg", "sglang"),
    commands=commands,
    workers_max=16,
)
