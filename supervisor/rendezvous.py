"""Where decodes meet a prefill: at another port in each life of its engine.

SGLang's decodes remember what they were told at an address for as long as anybody answers there. A prefill that starts
again at the same one, within seconds, is never asked: they wait for the processes of its former life.
"""

from __future__ import annotations

import socket
from contextlib import suppress

from attrs import evolve

from actors.engines.sglang.settings import EngineSpec
from protocol.errors import StartFailed

PORTS = 32  # from `bootstrap_port` on; a second each, and 15 s after a life its decodes have forgotten its port


def for_a_new_life(spec: EngineSpec, now_s: float) -> EngineSpec:
    """Return the same engine at a port that no life of the last half minute had, and that is free.

    Raises `StartFailed` if none is.
    """
    if spec.bootstrap_port is None or spec.nodes > 1:  # ranks on other nodes are told of one port, by their files
        return spec
    family = socket.AF_INET6 if ":" in spec.host else socket.AF_INET
    for later in range(PORTS):
        port = spec.bootstrap_port + (int(now_s) + later) % PORTS
        with suppress(OSError), socket.create_server((spec.host, port), family=family):
            return evolve(spec, bootstrap_port=port)
    last = spec.bootstrap_port + PORTS - 1
    raise StartFailed(f"engine {spec.name}: none of the ports {spec.bootstrap_port} to {last} of {spec.host} is free")
