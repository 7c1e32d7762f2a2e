"""NVIDIA Dynamo 1.6.1: its front end and workers with SGLang's engine, which meet in a folder: no etcd, no NATS."""

from __future__ import annotations

from bench.peers import cpu_sglang
from bench.peers.peer import Command, Peer, Setup

PLANES = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")


def variables(setup: Setup) -> dict[str, str]:
    """Return what its processes find each other by, and a home of their own, where the front end keeps models."""
    home = setup.folder / "home"
    discovery = setup.folder / "discovery"
    for folder in (home, discovery):
        folder.mkdir(exist_ok=True)
    return {"DYN_FILE_KV": str(discovery), "DYN_LOG": "warn", "HOME": str(home)}


def front_end(setup: Setup, environment: str) -> Command:
    """Return the command of the front end."""
    where = ("--http-host", "127.0.0.1", "--http-port", str(setup.port))
    return Command("frontend", (setup.python(environment), "-m", "dynamo.frontend", *where, *PLANES), variables(setup))


def commands(setup: Setup) -> list[Command]:
    """Return the commands of the front end and its workers."""
    words = (setup.python("dynamo"), "-m", "dynamo.sglang", *cpu_sglang.flags(setup), *PLANES)
    added = {**cpu_sglang.VARIABLES, **variables(setup)}
    workers = [Command(f"worker-{number}", words, added) for number in range(setup.workers)]
    return [front_end(setup, "dynamo"), *workers]


PEER = Peer(
    name="dynamo",
    title="Dynamo 1.6.1, front end and dynamo.sglang",
    engine="sglang",
    environments=("dynamo",),
    commands=commands,
    workers_max=16,
)
