"""This server, in the forms that are compared: one node with its engines, or a gateway's node and one for each engine.

The engine has the flags of `cpu_sglang`, by the names of `cluster.toml`; a test compares the two.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.load.messages import Api
from bench.peers.mock_model import mock_model
from bench.peers.peer import MODEL, MODEL_FOLDER, PAGE_SIZE, PREFILL_CHUNK, Command, Engine, Peer, Setup
from bench.rig.node import free_ports

CLIENTS_MAX = 8192
FRONT = "front"

STREAMS_MAX = 1024  # on a link, as it is without a line for it
CLUSTER = """\
[cluster]
streams_max = {streams_max}
"""
GATEWAY = """\
[gateway]
node = "{node}"
processes = {processes}
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
{model_lines}
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


def cluster_text(
    setup: Setup, engine: str, path: Path, *, apart: bool, gateways: int = 1, model_lines: str = ""
) -> str:
    """Return the cluster's description; `apart`: each engine is on a node of its own; `gateways`: its processes."""
    workers = [f"worker-{number}" for number in range(setup.workers)] if apart else []
    ports = free_ports(len(workers)) if workers else []
    listens = {name: f'listen = "127.0.0.1:{port}"' for name, port in zip(workers, ports, strict=True)}
    nodes = [NODE.format(name=name, listen=listens.get(name, "")) for name in (FRONT, *workers)]
    gateway = GATEWAY.format(
        node=FRONT,
        processes=gateways,
        port=setup.port,
        clients_max=CLIENTS_MAX,
        model=MODEL,
        path=path,
        model_lines=model_lines,
    )
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
    cluster = CLUSTER.format(streams_max=max(STREAMS_MAX, setup.slots))
    return "".join((cluster, *nodes, gateway, *engines))


def commands(
    setup: Setup, engine: str, path: Path, *, apart: bool, gateways: int = 1, model_lines: str = ""
) -> list[Command]:
    """Return the command of a cluster whose engines have a text; `model_lines` are more lines of the model."""
    file = setup.folder / "cluster.toml"
    file.write_text(cluster_text(setup, engine, path, apart=apart, gateways=gateways, model_lines=model_lines))
    return [Command("launcher" if apart else "node", (sys.executable, "-m", "supervisor", str(file)))]


APIS: tuple[Api, ...] = ("chat", "responses-ws", "responses", "completions")


def _peer(name: str, title: str, engine: Engine, *, apart: bool, gateways: int = 1) -> Peer:
    def start(setup: Setup) -> list[Command]:
        if engine == "sglang":
            return commands(setup, SGLANG, MODEL_FOLDER, apart=apart)
        return commands(setup, SIMULATED, mock_model(setup.folder / "model"), apart=apart, gateways=gateways)

    return Peer(name=name, title=title, engine=engine, commands=start, apis=APIS, workers_max=16, ready_path="/ready")


GATEWAYS = "Espalier, two gateway processes, simulated engines"
PEERS = (
    _peer("espalier", "Espalier, one node", "sglang", apart=False),
    _peer("espalier-nodes", "Espalier, engines on other nodes", "sglang", apart=True),
    _peer("espalier-simulated", "Espalier, simulated engines on other nodes", "simulated", apart=True),
    _peer("espalier-gateways", GATEWAYS, "simulated", apart=True, gateways=2),
    _peer("espalier-simulated-node", "Espalier, one node, simulated engines", "simulated", apart=False),
)
