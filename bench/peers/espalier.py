"""This server, in the forms that are compared: one node with its engines, or a gateway's node and one for each engine.

The engine has the flags of `cpu_sglang`, by the names of `cluster.toml`; a test compares the two.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.load.messages import Api
from bench.peers.mock_model import mock_model
from bench.peers.peer import MODEL, MODEL_FOLDER, PAGE_SIZE, PREFILL_CHUNK, Command, Peer, Setup
from bench.rig.node import free_ports

CLIENTS_MAX = 8192
FRONT = "front"

GATEWAY = """\
[gateway]
{node}
port = {port}
requests_max = {clients_max}
waiting_max = {clients_max}
[gateway.limits]
connections_max = {clients_max}
key_connections_max = {clients_max}
key_requests_max = {clients_max}
[model.{model}]
path = "{path}"
queue_max = {clients_max}
"""
NODE = """\
[node.{name}]
drain_s = 5
{listen}
"""
SGLANG = """\
[engine.{model}-{number}]
{node}
model = "{model}"
device = "cpu"
slots = {slots}
kv_tokens_max = {kv_tokens_max}
page_size = {page_size}
prefill_chunk = {prefill_chunk}
"""
SIMULATED = """\
[engine.{model}-{number}]
{node}
model = "{model}"
kind = "simulated"
slots = {slots}
kv_tokens_max = 1_000_000
context_max = 8192
[engine.{model}-{number}.simulated.costs]
fixed_s = {step_s}
per_prefill_token_s = 0.0
per_running_s = 0.0
"""


def cluster_text(setup: Setup, engine: str, path: Path, *, apart: bool) -> str:
    """Return the cluster's description; `apart`: each engine is on a node of its own."""
    workers = [f"worker-{number}" for number in range(setup.workers)] if apart else []
    ports = free_ports(len(workers)) if workers else []
    listens = {name: f'listen = "127.0.0.1:{port}"' for name, port in zip(workers, ports, strict=True)}
    nodes = [NODE.format(name=name, listen=listens.get(name, "")) for name in (FRONT, *workers)]
    gateway = GATEWAY.format(node=f'node = "{FRONT}"', port=setup.port, clients_max=CLIENTS_MAX, model=MODEL, path=path)
    engines = [
        engine.format(
            model=MODEL,
            number=number,
            node=f'node = "{workers[number] if apart else FRONT}"',
            slots=setup.slots,
            kv_tokens_max=setup.kv_tokens_max,
            page_size=PAGE_SIZE,
            prefill_chunk=PREFILL_CHUNK,
            step_s=setup.step_s,
        )
        for number in range(setup.workers)
    ]
    return "".join((*nodes, gateway, *engines))


def _commands(setup: Setup, engine: str, path: Path, *, apart: bool) -> list[Command]:
    file = setup.folder / "cluster.toml"
    file.write_text(cluster_text(setup, engine, path, apart=apart))
    return [Command("launcher" if apart else "node", (sys.executable, "-m", "supervisor", str(file)))]


def one_node(setup: Setup) -> list[Command]:
    """Return the command of one node with SGLang's engines."""
    return _commands(setup, SGLANG, MODEL_FOLDER, apart=False)


def nodes(setup: Setup) -> list[Command]:
    """Return the command of a launcher: a gateway's node, and a node for each of SGLang's engines."""
    return _commands(setup, SGLANG, MODEL_FOLDER, apart=True)


def simulated(setup: Setup) -> list[Command]:
    """Return the command of a launcher: a gateway's node, and a node for each simulated engine."""
    return _commands(setup, SIMULATED, mock_model(setup.folder / "model"), apart=True)


def simulated_one_node(setup: Setup) -> list[Command]:
    """Return the command of one node with simulated engines."""
    return _commands(setup, SIMULATED, mock_model(setup.folder / "model"), apart=False)


APIS: tuple[Api, ...] = ("chat", "responses-ws", "responses", "completions")
PEERS = (
    Peer(
        name="espalier",
        title="Espalier, one node",
        engine="sglang",
        commands=one_node,
        apis=APIS,
        workers_max=16,
        ready_path="/ready",
    ),
    Peer(
        name="espalier-nodes",
        title="Espalier, engines on other nodes",
        engine="sglang",
        commands=nodes,
        apis=APIS,
        workers_max=16,
        ready_path="/ready",
    ),
    Peer(
        name="espalier-simulated",
        title="Espalier, simulated engines on other nodes",
        engine="simulated",
        commands=simulated,
        apis=APIS,
        workers_max=16,
        ready_path="/ready",
    ),
    Peer(
        name="espalier-simulated-node",
        title="Espalier, one node, simulated engines",
        engine="simulated",
        commands=simulated_one_node,
        apis=APIS,
        workers_max=16,
        ready_path="/ready",
    ),
)
