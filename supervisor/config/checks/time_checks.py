"""Checks of the times in `cluster.toml`: contradictory or meaninglessly short ones."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from protocol.strict.mistakes import Mistake, join, segment
from supervisor.config.schema import Cluster

SHORTEST_S = 1e-6
GATEWAY = (("admit_s", "first_token_s"), ("first_token_s", "total_s"))
DEADLINES = (("first_token_s", "total_s"), ("gap_s", "total_s"))


def mistakes(cluster: Cluster) -> Iterator[Mistake]:
    """Yield a mistake for each time without effect beside a shorter one, and for each below a microsecond."""
    yield from _ordered(cluster.gateway, GATEWAY, "gateway")
    yield from _too_short(cluster.gateway, "gateway")
    yield from _too_short(cluster.gateway.limits, "gateway.limits")
    yield from _too_short(cluster.cluster, "cluster")
    for name, node in cluster.node.items():
        yield from _too_short(node, f"node.{name}")
    for name, engine in cluster.engine.items():
        path = join("engine", segment(name))
        yield from _ordered(engine.deadlines, DEADLINES, f"{path}.deadlines")
        yield from _too_short(engine.deadlines, f"{path}.deadlines")
        yield from _too_short(engine.canary, f"{path}.canary")


def _ordered(section: attrs.AttrsInstance, pairs: tuple[tuple[str, str], ...], path: str) -> Iterator[Mistake]:
    """Yield a mistake for each time that can never pass before the second of its pair, unless it is a default."""
    fields = attrs.fields_dict(type(section))
    for shorter, longer in pairs:
        least, most = getattr(section, shorter), getattr(section, longer)
        if least > most and least != fields[shorter].default:
            yield Mistake(f"{path}.{shorter}", f"is {least:g}, and can never pass before {longer}, {most:g}")


def _too_short(section: attrs.AttrsInstance, path: str) -> Iterator[Mistake]:
    for attribute in attrs.fields(type(section)):
        name, value = attribute.name, getattr(section, attribute.name)
        if name.endswith("_s") and isinstance(value, float) and 0 < value < SHORTEST_S:
            yield Mistake(f"{path}.{name}", f"is {value:g} s, which no clock tells from nothing")
