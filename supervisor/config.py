"""`cluster.toml`: what people write, structured strictly into one value; every mistake is reported at once."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Annotated, Literal

from attrs import Factory, asdict, evolve, field, frozen

from actors.decode import Deadlines
from actors.engines.sglang.settings import Setting
from actors.engines.simulated.costs import Costs
from actors.engines.simulated.faults import Faults
from protocol.dialects.mistakes import Mistake, Mistakes, describe, join, segment
from protocol.dialects.options import Holds, Matches, Within
from protocol.dialects.structure import structure
from protocol.errors import StartFailed
from supervisor.doors.door import ANY, Count, DoorLimits, Seconds
from supervisor.doors.tls import Certificate
from supervisor.process import Ladder

NodeName = Annotated[str, Matches(r"[a-z0-9][a-z0-9-]{0,31}", "lower-case letters, digits and dashes")]
EngineName = Annotated[str, Matches(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", "letters, digits, dashes, dots and _")]
RESERVED = ("gateway", "zygote")
LOOPBACK = ("127.0.0.1", "::1", "localhost")
EVERYWHERE = ("0.0.0.0", "::", "")  # noqa: S104  # they are recognised here, not bound
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\\s?#@]+")


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
    names: tuple[str, ...] = ()  # that clients may call this server by; none: loopback's names, and `host`
    origins: tuple[str, ...] = ()  # of web pages that may use this server
    keys: str | None = None  # a file of keys; paths are relative to the file they stand in
    tls_certificate: str | None = None
    tls_key: str | None = None
    requests_max: Count = 256
    waiting_max: Count = 256
    admit_s: Seconds = 5.0
    first_token_s: Seconds = 120.0  # from the client's question on, waiting included
    total_s: Seconds = 900.0
    prompt_tokens_max: Count = 262_144  # of one request, whatever its model would hold
    limits: DoorLimits = DoorLimits()


@frozen(kw_only=True)
class ModelSection:
    """`[model.NAME]`: what is served under a name."""

    path: Annotated[str, Holds(1)]  # a folder; relative to the file it stands in
    template: str | None = None  # a file with a chat template that replaces the model's own
    queue_max: Count = 64  # requests that wait for an engine


@frozen(kw_only=True)
class SimulatedSection:
    """`[engine.NAME.simulated]`: how an engine without a model answers, and how long it takes."""

    waiting_max: Count = 256  # requests that wait inside it
    prefill_chunk: Count = 2048
    prefix_cache: bool = True
    length_min: Count = 16  # of an answer that ends by itself, in tokens
    length_max: Count = 512
    seed: int = 0
    costs: Costs = Costs()
    faults: Faults = Faults()


@frozen(kw_only=True)
class EngineSection:
    """`[engine.NAME]`: one engine; SGLang runs in a process of its own."""

    model: Annotated[str, Holds(1)]
    node: NodeName = "main"
    kind: Literal["sglang", "simulated"] = "sglang"
    device: Literal["cpu", "cuda"] | None = None  # of SGLang
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
    simulated: SimulatedSection = SimulatedSection()


@frozen(kw_only=True)
class Cluster:
    """The whole file."""

    model: Annotated[dict[str, ModelSection], Holds(1)]
    engine: Annotated[dict[EngineName, EngineSection], Holds(1)]
    node: dict[NodeName, NodeSection] = Factory(lambda: {"main": NodeSection()})
    gateway: GatewaySection = GatewaySection()
    folder: Path = field(default=Path(), init=False)  # where the file stands

    @property
    def keys(self) -> Path | None:
        """The file of keys."""
        return None if self.gateway.keys is None else self.folder / self.gateway.keys

    @property
    def certificate(self) -> Certificate | None:
        """What the gateway shows to clients that speak TLS."""
        certificate, key = self.gateway.tls_certificate, self.gateway.tls_key
        return None if certificate is None or key is None else Certificate(self.folder / certificate, self.folder / key)

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
        mistakes = (*_disagreements(cluster), *_gateway_disagrees(cluster))
        cluster = _with_names(cluster)
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


def _gateway_disagrees(cluster: Cluster) -> Iterator[Mistake]:
    gateway = cluster.gateway
    if gateway.host in EVERYWHERE and not gateway.names:
        yield Mistake(
            "gateway.names", f"is missing: {gateway.host} is every address, so say what clients call this server"
        )
    for key in ("keys", "tls_certificate", "tls_key"):
        file = getattr(gateway, key)
        if file is not None and not (cluster.folder / file).is_file():
            yield Mistake(f"gateway.{key}", f"there is no file {cluster.folder / file}")
    if (gateway.tls_certificate is None) != (gateway.tls_key is None):
        one, other = ("tls_certificate", "tls_key")[:: 1 if gateway.tls_key is None else -1]
        yield Mistake(f"gateway.{one}", f"means nothing without {other}")
    for index, origin in enumerate(gateway.origins):
        if origin != ANY and not ORIGIN.fullmatch(origin.lower()):
            yield Mistake(
                f"gateway.origins[{index}]", f"must be like https://app.example, without a path; got {describe(origin)}"
            )


def _with_names(cluster: Cluster) -> Cluster:
    """Return the same cluster with the names that its gateway answers to, as `Host` and `Origin` are compared."""
    gateway = cluster.gateway
    names = gateway.names or dict.fromkeys((*LOOPBACK, gateway.host))
    names, origins = (tuple(each.lower() for each in some) for some in (names, gateway.origins))
    changed = evolve(cluster, gateway=evolve(gateway, names=names, origins=origins))
    object.__setattr__(changed, "folder", cluster.folder)
    return changed


def _engine_disagrees(cluster: Cluster, engine: EngineSection, at: str) -> Iterator[Mistake]:
    if engine.model not in cluster.model:
        yield Mistake(f"{at}.model", f"there is no model {engine.model}; there is {', '.join(cluster.model)}")
    if engine.node not in cluster.node:
        yield Mistake(f"{at}.node", f"there is no node {engine.node}; there is {', '.join(cluster.node)}")
    elif engine.node != cluster.gateway.node:
        yield Mistake(f"{at}.node", "an engine runs on the gateway's node until nodes have links")
    yield from (_only_sglangs if engine.kind == "simulated" else _only_simulated)(engine, at)
    if engine.device == "cpu" and engine.tensor_parallel > 1:
        yield Mistake(f"{at}.tensor_parallel", "an engine on a CPU has one rank")
    if engine.kv_tokens_max < 2 * engine.page_size:
        yield Mistake(f"{at}.kv_tokens_max", f"is less than two pages of {engine.page_size} tokens")
    for table, times in (("deadlines", asdict(engine.deadlines)), ("ladder", asdict(engine.ladder))):
        for key, value in times.items():
            if not 0 < value < inf:
                yield Mistake(f"{at}.{table}.{key}", f"must be above 0 and finite, got {value}")


def _only_simulated(engine: EngineSection, at: str) -> Iterator[Mistake]:
    if engine.device is None:
        yield Mistake(f"{at}.device", 'is missing; expected "cpu" or "cuda"')
    if engine.simulated != SimulatedSection():
        yield Mistake(f"{at}.simulated", 'is for engines of kind "simulated"')


def _only_sglangs(engine: EngineSection, at: str) -> Iterator[Mistake]:
    for key in ("device", "tensor_parallel", "memory_fraction", "settings", "environment"):
        if getattr(engine, key) not in (None, 1, {}):
            yield Mistake(f"{at}.{key}", "means nothing to a simulated engine")
    if engine.simulated.length_min > engine.simulated.length_max:
        yield Mistake(f"{at}.simulated.length_min", f"must be at most length_max ({engine.simulated.length_max})")


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
