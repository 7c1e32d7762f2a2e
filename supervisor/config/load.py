"""The loading of `cluster.toml`: its text becomes one immutable value, or one error with every mistake in it.

An operator corrects a file once, instead of once for each mistake. So unreadable parts of the file are left out
(`partial.py`), the rest is checked as if they were right, and possible consequences of the left-out parts are
suppressed. Each mistake is reported with the line of its key. A node never runs with a file with mistakes; commands for
operators may use the rest of it to reach running nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from attrs import evolve, field, frozen

from protocol.errors import StartFailed
from protocol.strict.mistakes import Mistake
from supervisor.config import gateway_nodes, section_names, toml_file
from supervisor.config.checks.cross_checks import cross_check
from supervisor.config.partial import structure_valid_parts
from supervisor.config.schema import Cluster, Kinds, Tables, sections
from supervisor.config.sections import LOOPBACK_HOSTS
from supervisor.config.toml_lines import line_of, lines_of

FILE_BYTES_MAX = 4 * 1024 * 1024

Examine: TypeAlias = Callable[[Cluster], Iterable[Mistake]]
"""Yields the mistakes in a cluster's files and environment variables."""


class FileMistakes(StartFailed):
    """All mistakes in a file, a line each; `cluster` is the cluster of the rest, None if too little is left."""

    def __init__(self, sentence: str, cluster: Cluster | None) -> None:
        super().__init__(sentence)
        self.cluster = cluster


class Misconfigured(StartFailed):
    """A mistake in the file or variable named by the key at `path`, or in its absence, with others of the same sort."""

    def __init__(self, path: str, sentence: str, others: Sequence[Misconfigured] = ()) -> None:
        super().__init__("; ".join([sentence, *map(str, others)]))
        self.path = path
        self.mistakes: tuple[Mistake, ...] = (
            Mistake(path, sentence),
            *(mistake for other in others for mistake in other.mistakes),
        )


@frozen
class Loaded:
    """A cluster with its sources, for loading it again."""

    cluster: Cluster
    file: Path
    kinds: Kinds
    joined: tuple[str, ...] = ()  # addresses from the command line, added to `cluster.join`
    lines: Mapping[str, int] = field(factory=dict, repr=False)  # the line of each key, by its path

    def again(self, examine: Examine | None = None) -> Loaded:
        """Load the same file again; raises as `load` does."""
        return load(self.file, self.kinds, self.joined, examine)

    @contextmanager
    def locating_mistakes(self) -> Iterator[None]:
        """Raise a `Misconfigured` from the body as `FileMistakes`, with lines of the file."""
        try:
            yield
        except Misconfigured as error:
            mistake, *others = error.mistakes
            if others:
                raise FileMistakes(_report(self.file, error.mistakes, self.lines), self.cluster) from error
            sentence = _printable(str(mistake))
            line = line_of(mistake.path, self.lines)
            raise FileMistakes(f"{self.file}, line {line}: {sentence}", self.cluster) from error


def load(path: Path, kinds: Kinds, join: Sequence[str] = (), examine: Examine | None = None) -> Loaded:
    """Read and check a file, and add `join` to its `cluster.join`.

    A mistake in one place hides none in another, unless the second follows from the first. Raises `FileMistakes` with
    all of them, and `StartFailed` for a file that is not TOML.
    """
    text = read_text(path)
    data = toml_file.parse(path, text)
    try:
        lines = lines_of(text)
        if join:
            section = data.setdefault("cluster", {})
            if isinstance(section, dict) and isinstance(section.get("join", []), list):  # else `structure` reports it
                section["join"] = [*section.get("join", ()), *join]
        misnamed = section_names.mend(data, lines, sections(kinds))
        pruned = structure_valid_parts(data, kinds)
    except RecursionError as error:
        raise StartFailed(f"{path} is not TOML: it nests too deeply") from error
    mistakes = [*misnamed, *pruned.mistakes]
    cluster = None if pruned.tables is None else _in_folder(pruned.tables, path.parent)
    if cluster is not None:
        mistakes += [mistake for mistake in cross_check(cluster, kinds) if not pruned.explains(mistake)]
        wrong_paths = {mistake.path for mistake in mistakes}  # one mistake a key: a missing file is also unreadable
        examined = () if examine is None else examine(cluster)
        mistakes += [
            mistake for mistake in examined if mistake.path not in wrong_paths and not pruned.explains(mistake)
        ]
        cluster = gateway_nodes.expand(_with_hosts(cluster))
    if mistakes or cluster is None:
        raise FileMistakes(_report(path, mistakes, lines), cluster)
    return Loaded(cluster, path, kinds, tuple(join), lines)


def read_text(path: Path) -> str:
    """Return the text of a cluster's file; raises `StartFailed` if it cannot be read."""
    return toml_file.read_text(path, FILE_BYTES_MAX)


def _report(path: Path, mistakes: Iterable[Mistake], lines: Mapping[str, int]) -> str:
    """Return one row for each mistake, by line; control characters of the file are escaped."""
    numbered = dict.fromkeys((line_of(mistake.path, lines), _printable(str(mistake))) for mistake in mistakes)
    rows = [f"  line {line}: {sentence}" for line, sentence in sorted(numbered, key=lambda row: row[0])]
    return "\n".join([f"{path} has {len(rows)} mistake{'s'[: len(rows) > 1]}:", *rows])


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _in_folder(tables: Tables, folder: Path) -> Cluster:
    return Cluster(
        model=tables.model,
        engine=tables.engine,
        node=tables.node,
        gateway=tables.gateway,
        cluster=tables.cluster,
        pool=tables.pool,
        tracing=tables.tracing,
        folder=folder,
    )


def _with_hosts(cluster: Cluster) -> Cluster:
    """Return the cluster with default `allowed_hosts`, and names in lower case, for comparisons."""
    gateway = cluster.gateway
    names = gateway.allowed_hosts or dict.fromkeys((*LOOPBACK_HOSTS, gateway.host))
    names, origins = (tuple(map(str.lower, listed)) for listed in (names, gateway.allowed_origins))
    return evolve(cluster, gateway=evolve(gateway, allowed_hosts=names, allowed_origins=origins))
