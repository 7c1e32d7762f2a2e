"""The shared libraries that an engine's transfers need: looked for before anything starts, and not loaded."""

from __future__ import annotations

from ctypes.util import find_library

from protocol.errors import StartFailed
from supervisor.config.load import Cluster

MOONCAKE_LIBRARIES = {"ibverbs": "libibverbs1", "rdmacm": "librdmacm1"}
"""What Mooncake's engine is linked against, over TCP too, and the Debian package of each."""


def check_libraries(cluster: Cluster, *nodes: str) -> None:
    """Raise `StartFailed` with the line that installs what a prefill or a decode of these nodes lacks.

    SGLang says so itself only when the engine has loaded, and then advises to build Mooncake.
    """
    pairs = [
        key
        for key, engine in cluster.engine.items()
        if engine.kind == "sglang" and engine.leg != "both" and any(node in nodes for node in engine.nodes)
        if (engine.transfer or "mooncake").startswith("mooncake")
    ]
    lacking = [name for name in MOONCAKE_LIBRARIES if find_library(name) is None] if pairs else []
    if lacking:
        raise StartFailed(
            f"engine {pairs[0]} is one leg of a pair, and Mooncake, which moves its KV caches, cannot be loaded without"
            f" {' and '.join(f'lib{name}.so.1' for name in lacking)}:"
            f" apt-get install {' '.join(MOONCAKE_LIBRARIES[name] for name in lacking)}"
        )
