"""The shared libraries that KV transfers need: looked for before a node starts, and not loaded."""

from __future__ import annotations

from ctypes.util import find_library

from protocol.errors import StartFailed
from supervisor.config.schema import EngineSection
from supervisor.engines.sglang.section import SglangSection

MOONCAKE_LIBRARIES = {"ibverbs": "libibverbs1", "rdmacm": "librdmacm1"}
"""The libraries that Mooncake's engine is linked against, over TCP too, with the Debian package of each."""


def check_libraries(name: str, section: EngineSection) -> None:
    """Raise `StartFailed`, with the command to install them, for missing libraries of a prefill or a decode.

    SGLang reports it only when the engine has loaded its weights, and then advises to build Mooncake.
    """
    assert isinstance(section, SglangSection)
    if section.leg in {"both", "encode"} or not (section.transfer or "mooncake").startswith("mooncake"):
        return
    lacking = [library for library in MOONCAKE_LIBRARIES if find_library(library) is None]
    if lacking:
        raise StartFailed(
            f"engine {name} is one leg of a pair, and Mooncake, which moves its KV caches, cannot be loaded without"
            f" {' and '.join(f'lib{library}.so.1' for library in lacking)}:"
            f" apt-get install {' '.join(MOONCAKE_LIBRARIES[library] for library in lacking)}"
        )
