"""The servers to start, by their names, and the pairs of ours and theirs to compare."""

from __future__ import annotations

from bench.peers import dynamo, espalier, sglang_server
from bench.peers.peer import Engine, Peer

RIVALS: dict[str, Peer] = {peer.name: peer for peer in (*sglang_server.PEERS, *dynamo.PEERS)}
OURS: dict[str, Peer] = {peer.name: peer for peer in espalier.PEERS}
SERVERS: dict[str, Peer] = {**OURS, **RIVALS}

COUNTERPARTS: dict[Engine, str] = {"sglang": "espalier", "simulated": "espalier-simulated"}
"""Which of ours is compared with a peer, by the peer's engine."""
