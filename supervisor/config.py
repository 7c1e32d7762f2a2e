"""`cluster.toml`: what people write, structured strictly into one value; every mistake is reported at once."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Annotated, Literal

from attrs import Factory, asdict, field, frozen

from actors.decode import Deadlines
from actors.engines.sglang.settings import Setting
from protocol.dialects.mistakes import Mistake, Mistakes, join, segment
from protocol.dialects.options import Holds, Matches, Within
from protocol.dialects.structure import structure
from protocol.errors import StartFailed
from supervisor.doors.door import Count, DoorLimits, Seconds
from supervisor.process import Ladder

NodeName = Annotated[str, Matches(r"[a-z0-9][a-z0-9-]{0,31}", "lower-case letters, digits and dashes")]
EngineName = Annotated[str, Matches(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", "letters, digits, dashes, dots and _")]
RESERVED = ("gateway", "zygote")
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@frozen(kw_only=True)
class NodeSection:
    """`[node.NAME]`: one process with one tree."""

    host: str = "localhost"  # the machine it runs on
    drain_s: Seconds = 30.0  # that streams may take to finish after a signal
    logs: str | None = None  # a folder for what engines say; without one it is gone when the node is
    chatter_bytes_max: Count = 4 * 1024 * 1024


@frozen(kw_only=True)
class GatewaySection:
    """`[gateway]`: where clients knock."""

    node: NodeName = "main"
    host: str = "127.0.0.1"
    port: Annotated[int, Within(at_least=0, at_most=65535)] = 8000
    names: tuple[str, ...] = LOOPBACK  # that clients may call this server by
    requests_max: Count = 256
    waiting_max: Count = 256
    admit_s: Seconds = 5.0
    first_token_s: Seconds = 120.0  # from the client's question on, waiting included
    total_s: Seconds = 900.0
    limits: DoorLimits = DoorLimits()


@frozen(kw_only=True)
class ModelSection:
    """`[model.NAME]`: what is served under a name."""

    path: Annotated[str, Holds(1)]  # a folder; relative to the file it stands in
    template: str | None = None  # a file with a chat template that replaces the model's own
    queue_max: Count = 64  # requests that wait for an engine


@frozen(kw_only=True)
class EngineSection:
    """`[engine.NAME]`: one engine, a process of its own."""

    model: Annotated[str, Holds(1)]
    node: NodeName = "main"
    kind: Literal["sglang"] = "sglang"
    device: Literal["cpu", "cuda"]
    slots: Count = 16
    kv_tokens_max: Count
    context_max: Count | None = None
    page_size: Count = 16
    tensor_parallel: Count = 1
    memory_fraction: Annotated[float, Within(above=0, at_most=1)] | None = None
    prefill_chunk: Count | None = None  # the longest piece of a prompt that an engine step computes
    start_within_s: Seconds = 120.0
    deadlines: Deadlines = Deadlines()
    ladder: Ladder = Ladder()
    settings: dict[str, Setting] = Factory(dict)
    environment: dict[str, str] = Factory(dict)


@frozen(kw_only=True)
class Cluster:
    """The whole file."""

    model: Annotated[dict[str, ModelSection], Holds(1)]
    engine: Annotated[dict[EngineName, EngineSection], Holds(1)]
    node: dict[NodeName, NodeSection] = Factory(lambda: {"main": NodeSection()})
    gateway: GatewaySection = GatewaySection()
    folder: Path = field(default=Path(), init=False)  # where the file stands

    def engines_on(self, node: str) -> dict[str, EngineSection]:
        """Return the engines that a node runs."""
        return {name: engine for name, engine in self.engine.items() if engine.node == node}

    def model_path(self, name: str) -> Path:
        """Return the folder of a model."""
        return (self.folder / Path(self.model[name].path).expanduser()).resolve()


def read(path: Path) -> Cluster:
    """Read and check a file; raises `StartFailed` with every mistake in it, one a line."""
    try:
        text = path.read_text()
        data = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise StartFailed(f"{path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise StartFailed(f"{path} is not TOML: {error}") from error
    try:
        cluster = structure(data, Cluster)
        object.__setattr__(cluster, "folder", path.parent)
        mistakes = tuple(_disagreements(cluster))
    except Mistakes as error:
        mistakes = error.mistakes
    if mistakes:
        lines = (f"  line {_line(text, mistake.path)}: {mistake}" for mistake in mistakes)
        raise StartFailed("\n".join([f"{path} has {len(mistakes)} mistake{'s'[: len(mistakes) > 1]}:", *lines]))
    return cluster


def _disagreements(cluster: Cluster) -> Iterator[Mistake]:
    """Yield what is wrong between keys that are each right by themselves."""
    if cluster.gateway.node not in cluster.node:
        yield Mistake("gateway.node", f"there is no node {cluster.gateway.node}; there is {', '.join(cluster.node)}")
    if cluster.gateway.host not in LOOPBACK:
        yield Mistake("gateway.host", f"only loopback ({', '.join(LOOPBACK)}) until clients need keys")
    for name, model in cluster.model.items():
        at = join("model", segment(name))
        if all(engine.model != name for engine in cluster.engine.values()):
            yield Mistake(at, "no engine serves it")
        if not cluster.model_path(name).is_dir():
            yield Mistake(f"{at}.path", f"there is no folder {cluster.model_path(name)}")
        if model.template is not None and not (cluster.folder / model.template).is_file():
            yield Mistake(f"{at}.template", f"there is no file {cluster.folder / model.template}")
    for name, engine in cluster.engine.items():
        at = join("engine", segment(name))
        if name in RESERVED or name.startswith("processor-"):
            yield Mistake(at, "is the name of another part of the tree")
        yield from _engine_disagrees(cluster, engine, at)


def _engine_disagrees(cluster: Cluster, engine: EngineSection, at: str) -> Iterator[Mistake]:
    if engine.model not in cluster.model:
        yield Mistake(f"{at}.model", f"there is no model {engine.model}; there is {', '.join(cluster.model)}")
    if engine.node not in cluster.node:
        yield Mistake(f"{at}.node", f"there is no node {engine.node}; there is {', '.join(cluster.node)}")
    elif engine.node != cluster.gateway.node:
        yield Mistake(f"{at}.node", "an engine runs on the gateway's node until nodes have links")
    if engine.device == "cpu" and engine.tensor_parallel > 1:
        yield Mistake(f"{at}.tensor_parallel", "an engine on a CPU has one rank")
    if engine.kv_tokens_max < 2 * engine.page_size:
        yield Mistake(f"{at}.kv_tokens_max", f"is less than two pages of {engine.page_size} tokens")
    for table, times in (("deadlines", asdict(engine.deadlines)), ("ladder", asdict(engine.ladder))):
        for key, value in times.items():
            if not 0 < value < inf:
                yield Mistake(f"{at}.{table}.{key}", f"must be above 0 and finite, got {value}")


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
