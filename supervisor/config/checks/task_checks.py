"""Validation of the tasks of engines: a model has one task, and an embedder's section has no keys of other engines."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from protocol.messages.cluster import Leg
from protocol.strict.mistakes import Mistake, join, segment
from supervisor.config.schema import Cluster, EngineSection

NOT_OF_EMBEDDERS = (
    "leg",
    "data_parallel",
    "pending_prefill_tokens_max",
    "admission",
    "canary",
    "encoder",
    "events",
    "adapters",
)
DEADLINES = ("first_token_s", "gap_s")
NOT_OF_MODELS = ("policy", "prefill_tokens_min", "tools", "reasoning", "template", "kv")
"""The keys of a model that decide how it answers."""


def mistakes(cluster: Cluster) -> Iterator[Mistake]:
    """Yield the models with engines of two tasks, and the keys of models of vectors that decide about answers."""
    first: dict[str, str] = {}
    for name, engine in cluster.engine.items():
        other = cluster.engine[first.setdefault(engine.model, name)]
        if other.task != engine.task:
            why = f"is {engine.task}, and that of engine {first[engine.model]} is {other.task}: a model has one task"
            yield Mistake(join(join("engine", segment(name)), "task"), why)
        elif engine.worker_leg is Leg.EMBED and other is engine and engine.model in cluster.model:
            yield from _model_mistakes(cluster, engine)


def _model_mistakes(cluster: Cluster, engine: EngineSection) -> Iterator[Mistake]:
    model = cluster.model[engine.model]
    fields = attrs.fields_dict(type(model))
    for key in NOT_OF_MODELS:
        if getattr(model, key) != fields[key].default:
            path = join(join("model", segment(engine.model)), key)
            yield Mistake(path, f"is for models of answers, and the task of this one's engines is {engine.task}")


def embedder_mistakes(engine: EngineSection, path: str) -> Iterator[Mistake]:
    """Yield the keys in the section of an embedder that it does not have, and a kind without embedders."""
    if not engine.embeds:
        yield Mistake(f"{path}.task", f"an engine of kind {engine.kind} cannot be an embedder")
    fields = attrs.fields_dict(type(engine))
    others = [key for key in NOT_OF_EMBEDDERS if key in fields and getattr(engine, key) != fields[key].default]
    deadlines = attrs.fields_dict(type(engine.deadlines))
    others += [f"deadlines.{key}" for key in DEADLINES if getattr(engine.deadlines, key) != deadlines[key].default]
    for key in others:
        yield Mistake(f"{path}.{key}", f"is for engines that compute answers, and {path}.task is {engine.task}")
