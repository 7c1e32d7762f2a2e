"""The keys of an engine that computes vectors or scores, checked beside its other keys and its model's files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import attrs

from actors.engines.sglang.embedding_model import task_mistake
from protocol.strict.mistakes import Mistake
from supervisor.config.schema import Cluster, EngineSection

OF_ANSWERS = (
    "bootstrap_port",
    "diffusion",
    "diffusion_settings",
    "dist_port",
    "experts",
    "metrics",
    "ranks_on",
    "transfer",
    "vision",
)
"""The keys of this kind's engines that compute answers; `task_checks.py` has those of every kind."""


def mistakes(section: EngineSection, path: str) -> Iterator[Mistake]:
    """Yield the keys of an embedder that are for other engines."""
    if section.task == "generate":
        return
    fields = attrs.fields_dict(type(section))
    for key in OF_ANSWERS:
        default = fields[key].default
        if getattr(section, key) != default:
            yield Mistake(f"{path}.{key}", f"is for engines that compute answers, and {path}.task is {section.task}")


def model_mistakes(cluster: Cluster, section: EngineSection, overrides: str, path: str) -> Iterator[Mistake]:
    """Yield what the files of a model say against the task of its engine."""
    why = None
    with suppress(OSError, RuntimeError):  # other checks report a path that leads nowhere
        why = task_mistake(cluster.model_path(section.model), section.task, overrides)
    if why is not None:
        yield Mistake(f"{path}.task", f"is {section.task}, and {section.model} {why}")
