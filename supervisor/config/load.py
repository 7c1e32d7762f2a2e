"""`cluster.toml`: what people write, structured strictly into one value; every mistake is reported at once."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

from attrs import evolve, frozen

from protocol.errors import StartFailed
from protocol.strict.mistakes import Mistake
from supervisor.config.cross_checks import cross_check
from supervisor.config.partial import structure_what_can_be
from supervisor.config.schema import (
    LOOPBACK_HOSTS,
    WILDCARD_HOSTS,
    Cluster,
    ClusterSection,
    EngineSection,
    GatewaySection,
    Kinds,
    NodeSection,
    Tables,
)
from supervisor.config.toml_lines import line_of, lines_of
from supervisor.files import reading

__all__ = [
    "LOOPBACK_HOSTS",
    "WILDCARD_HOSTS",
    "Cluster",
    "ClusterSection",
    "EngineSection",
    "FileMistakes",
    "GatewaySection",
    "Loaded",
    "Misconfigured",
    "NodeSection",
    "load",
]

FILE_BYTES_MAX = 4 * 1024 * 1024

Examine: TypeAlias = Callable[[Cluster], Iterable[Mistake]]
"""Yields what is wrong with the files and variables that a cluster names."""


class FileMistakes(StartFailed):
    """Everything that is wrong in a file, a line each; `cluster` is the rest of it, if the rest is enough for one."""

    def __init__(self, sentence: str, cluster: Cluster | None) -> None:
        super().__init__(sentence)
        self.cluster = cluster


class Misconfigured(StartFailed):
    """What a key names, or what it leaves open, is wrong; `path` is the key's."""

    def __init__(self, path: str, sentence: str) -> None:
        super().__init__(sentence)
        self.path = path


@frozen
class Loaded:
    """A cluster, and what it was loaded from, so that it can be loaded again."""

    cluster: Cluster
    file: Path
    kinds: Kinds
    joined: tuple[str, ...] = ()  # what the command line has added to `cluster.join`

    def again(self, examine: Examine | None = None) -> Loaded:
        """Return what the same file describes now; raises as `load` does."""
        return load(self.file, self.kinds, self.joined, examine)


def load(path: Path, kinds: Kinds, join: Sequence[str] = (), examine: Examine | None = None) -> Loaded:
    """Read and check a file, and add `join` to its `cluster.join`.

    A mistake in one place hides none in another, unless the second follows from the first. Raises `FileMistakes` with
    all of them, and `StartFailed` for what is no TOML file.
    """
    text = _text(path)
    try:
        data = tomllib.loads(text)
        lines = lines_of(text)
    except tomllib.TOMLDecodeError as error:
        raise StartFailed(f"{path} is not TOML: {error}") from error
    except RecursionError as error:
        raise StartFailed(f"{path} is not TOML: it nests too deeply") from error
    if join:
        section = data.setdefault("cluster", {})
        if isinstance(section, dict) and isinstance(section.get("join", []), list):  # else it is one of the mistakes
            section["join"] = [*section.get("join", ()), *join]
    pruned = structure_what_can_be(data, kinds)
    mistakes = [*pruned.mistakes]
    cluster = None if pruned.tables is None else _in_folder(pruned.tables, path.parent)
    if cluster is not None:
        mistakes += [each for each in cross_check(cluster, kinds) if not pruned.explains(each)]
        wrong = {each.path for each in mistakes}  # a file that is not there cannot be read either
        examined = () if examine is None else examine(cluster)
        mistakes += [each for each in examined if each.path not in wrong and not pruned.explains(each)]
        cluster = _with_hosts(cluster)
    if mistakes or cluster is None:
        raise FileMistakes(_report(path, mistakes, lines), cluster)
    return Loaded(cluster, path, kinds, tuple(join))


def _text(path: Path) -> str:
    try:
        return reading.read(path, FILE_BYTES_MAX).decode("utf-8-sig").replace("\r\n", "\n")
    except OSError as error:
        raise StartFailed(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # UnicodeDecodeError is one
        raise StartFailed(f"{path} cannot be read: {error}") from error


def _report(path: Path, mistakes: Iterable[Mistake], lines: dict[str, int]) -> str:
    """Return a line a mistake in the order of their lines; what stands in the file does not reach the terminal raw."""
    told = dict.fromkeys((line_of(each.path, lines), _printable(str(each))) for each in mistakes)
    rows = [f"  line {line}: {said}" for line, said in sorted(told, key=lambda row: row[0])]
    return "\n".join([f"{path} has {len(rows)} mistake{'s'[: len(rows) > 1]}:", *rows])


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _in_folder(tables: Tables, folder: Path) -> Cluster:
    return Cluster(
        model=tables.model,
        engine=tables.engine,
        node=tables.node,
        gateway=tables.gateway,
        cluster=tables.cluster,
        folder=folder,
    )


def _with_hosts(cluster: Cluster) -> Cluster:
    """Return the same cluster with the names that its gateway answers to, as `Host` and `Origin` are compared."""
    gateway = cluster.gateway
    names = gateway.allowed_hosts or dict.fromkeys((*LOOPBACK_HOSTS, gateway.host))
    names, origins = (tuple(each.lower() for each in some) for some in (names, gateway.allowed_origins))
    return evolve(cluster, gateway=evolve(gateway, allowed_hosts=names, allowed_origins=origins))
