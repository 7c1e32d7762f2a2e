"""`cluster.toml`: what people write, structured strictly into one value; every mistake is reported at once."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

from attrs import evolve

from protocol.dialects.mistakes import Mistakes
from protocol.dialects.structure import structure
from protocol.errors import StartFailed
from supervisor.disagreements import disagreements
from supervisor.sections import (
    EVERYWHERE,
    LOOPBACK,
    Cluster,
    ClusterSection,
    EngineSection,
    GatewaySection,
    NodeSection,
)

__all__ = [
    "EVERYWHERE",
    "LOOPBACK",
    "Cluster",
    "ClusterSection",
    "EngineSection",
    "GatewaySection",
    "NodeSection",
    "read",
]


def read(path: Path, join: Sequence[str] = ()) -> Cluster:
    """Read and check a file, with more to `join` than it says; raises `StartFailed` with every mistake in it."""
    try:
        text = path.read_text()
        data = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise StartFailed(f"{path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise StartFailed(f"{path} is not TOML: {error}") from error
    if join:
        section = data.setdefault("cluster", {})
        if isinstance(section, dict) and isinstance(section.get("join", []), list):  # else it is one of the mistakes
            section["join"] = [*section.get("join", ()), *join]
    try:
        cluster = structure(data, Cluster)
        object.__setattr__(cluster, "folder", path.parent)
        object.__setattr__(cluster, "file", path)
        object.__setattr__(cluster, "joined", tuple(join))
        mistakes = tuple(disagreements(cluster))
        cluster = _with_names(cluster)
    except Mistakes as error:
        mistakes = error.mistakes
    if mistakes:
        lines = (f"  line {_line(text, mistake.path)}: {mistake}" for mistake in mistakes)
        raise StartFailed("\n".join([f"{path} has {len(mistakes)} mistake{'s'[: len(mistakes) > 1]}:", *lines]))
    return cluster


def _with_names(cluster: Cluster) -> Cluster:
    """Return the same cluster with the names that its gateway answers to, as `Host` and `Origin` are compared."""
    gateway = cluster.gateway
    names = gateway.names or dict.fromkeys((*LOOPBACK, gateway.host))
    names, origins = (tuple(each.lower() for each in some) for some in (names, gateway.origins))
    changed = evolve(cluster, gateway=evolve(gateway, names=names, origins=origins))
    object.__setattr__(changed, "folder", cluster.folder)
    object.__setattr__(changed, "file", cluster.file)
    object.__setattr__(changed, "joined", cluster.joined)
    return changed


def _line(text: str, path: str) -> int:
    """Return the number of the line that a key path leads to, or of the table it would stand in."""
    path = re.sub(r'\["([^"]*)"\]', r".\1", path)
    best, best_length, table = 1, -1, ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[+\s*([^\]]+?)\s*\]+", line):
            table = header[1].replace('"', "")
            here = table
        elif key := re.match(r'\s*([A-Za-z0-9_."-]+?)\s*=', line):
            here = ".".join(filter(None, [table, key[1].replace('"', "")]))
        else:
            continue
        if (path == here or path.startswith((f"{here}.", f"{here}["))) and len(here) > best_length:
            best, best_length = number, len(here)
    return best
