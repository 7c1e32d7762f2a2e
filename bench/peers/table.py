"""The servers that can be started, by their names, and which of ours is compared with which."""

from __future__ import annotations

from bench.peers import dynamo, dynamo_mocker, espalier, sglang_server, smg
from bench.peers.peer import Engine, Peer

RIVALS: dict[str, Peer] = {each.PEER.name: each.PEER for each in (sglang_server, dynamo, dynamo_mocker, smg)}
OURS: dict[str, Peer] = {peer.name: peer for peer in espalier.PEERS}
SERVERS: dict[str, Peer] = {**OURS, **RIVALS}

COUNTERPARTS: dict[Engine, str] = {"sglang": "espalier", "simulated": "espalier-simulated"}
"""Which of ours is compared with a peer, by the peer's engine."""
