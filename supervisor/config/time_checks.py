"""Times in `cluster.toml` that contradict each other, or that are too short to be meant."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from protocol.strict.mistakes import Mistake, join, segment
from supervisor.config.schema import Cluster

SHORTEST_S = 1e-6
GATEWAY = (("admit_s", "first_token_s"), ("first_token_s", "total_s"))
DEADLINES = (("first_token_s", "total_s"), ("gap_s", "total_s"))


def mistakes(cluster: Cluster) -> Iterator[Mistake]:
    """Yield every time that can never pass before another one has, and every one below a microsecond."""
    yield from _ordered(cluster.gateway, GATEWAY, "gateway")
    yield from _too_short(cluster.gateway, "gateway")
    yield from _too_short(cluster.gateway.limits, "gateway.limits")
    yield from _too_short(cluster.cluster, "cluster")
    for name, node in cluster.node.items():
        yield from _too_short(node, f"node.{name}")
    for name, engine in cluster.engine.items():
        at = join("engine", segment(name))
        yield from _ordered(engine.deadlines, DEADLINES, f"{at}.deadlines")
        yield from _too_short(engine.deadlines, f"{at}.deadlines")


def _ordered(section: attrs.AttrsInstance, pairs: tuple[tuple[str, str], ...], at: str) -> Iterator[Mistake]:
    """Yield what somebody wrote; a default that is too long for the other key is simply never reached."""
    usual = attrs.fields_dict(type(section))
    for shorter, longer in pairs:
        least, most = getattr(section, shorter), getattr(section, longer)
        if least > most and least != usual[shorter].default:
            yield Mistake(f"{at}.{shorter}", f"is {least:g}, and can never pass before {longer}, {most:g}")


def _too_short(section: attrs.AttrsInstance, at: str) -> Iterator[Mistake]:
    for each in attrs.fields(type(section)):
        value = getattr(section, each.name)
        if each.name.endswith("_s") and isinstance(value, float) and 0 < value < SHORTEST_S:
            yield Mistake(f"{at}.{each.name}", f"is {value:g} s, which no clock tells from nothing")
