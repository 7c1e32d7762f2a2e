"""Checks of a TensorRT-LLM engine against this host: its interpreter, and the files of its first adapters."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping

from protocol.strict.mistakes import Mistake
from supervisor.config.schema import Cluster, EngineSection
from supervisor.engines.trtllm.section import TrtllmSection


def mistakes(cluster: Cluster, section: EngineSection, path: str, environment: Mapping[str, str]) -> Iterator[Mistake]:
    """Yield what keeps an engine on this host from starting, by the keys of its section at `path`."""
    assert isinstance(section, TrtllmSection)
    if section.python is not None and shutil.which(section.python, os.X_OK, environment.get("PATH")) is None:
        yield Mistake(f"{path}.python", f"no program is there on this host: {section.python}")
    if (adapters := section.adapters) is not None:
        yield from adapters.file_mistakes(cluster.folder, cluster.model_path(section.model), f"{path}.adapters")
