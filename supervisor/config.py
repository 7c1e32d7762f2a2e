"""`cluster.toml`: what people write, structured strictly into one value; every mistake is reported at once."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path
from typing import Annotated, Literal

from attrs import Factory, asdict, evolve, field, frozen

from actors.decode import Deadlines
from actors.engines.sglang.settings import Setting
from actors.engines.simulated.costs import Costs
from actors.engines.simulated.faults import Faults
from protocol.cluster import OPERATOR
from protocol.dialects.mistakes import Mistake, Mistakes, describe, join, segment
from protocol.dialects.options import Holds, Matches, Within
from protocol.dialects.structure import structure
from protocol.errors import StartFailed
from supervisor.doors.door import ANY, Count, DoorLimits, Seconds
from supervisor.doors.tls import Certificate
from supervisor.process import Ladder

NodeName = Annotated[str, Matches(r"[a-z0-9][a-z0-9-]{0,31}", "lower-case letters, digits and dashes")]
EngineName = Annotated[str, Matches(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", "letters, digits, dashes, dots and _")]
AT = r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}"
ListenAt = Annotated[str, Matches(AT, "like 127.0.0.1:7401 or [::1]:7401")]
RESERVED = ("gateway", "links", "metrics", "zygote")
LOOPBACK = ("127.0.0.1", "::1", "localhost")
EVERYWHERE = ("0.0.0.0", "::", "")  # noqa: S104  # they are recognised here, not bound
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@\\]+")


@frozen(kw_only=True)
class NodeSection:
    """`[node.NAME]`: one process with one tree."""

    host: str = "localhost"  # the machine it runs on
    listen: ListenAt | None = None  # for other nodes: host:port
    metrics: ListenAt | None = None  # for probes and scrapers: host:port
    drain_s: Seconds = 30.0  # that streams may take to finish after a signal
    logs: str | None = None  # a folder for what engines say; without one it is gone when the node is
    chatter_bytes_max: Count = 4 * 1024 * 1024


@frozen(kw_only=True)
class ClusterSection:
    """`[cluster]`: how nodes know each other, and how they keep in touch."""

    name: NodeName = "espalier"
    secret: str | None = None  # a file with what every node of the cluster knows and nobody else
    tls_certificate: str | None = None  # of this host's nodes, shown to the others
    tls_key: str | None = None
    tls_authority: str | None = None  # who must have signed the others' certificates
    join: tuple[ListenAt, ...] = ()  # where nodes listen that know of a cluster which this file does not describe
    streams_max: Count = 1024  # that one node may have open on another
    beat_s: Seconds = 1.0
    silent_s: Seconds = 3.0  # after which a node that says nothing counts as lost
    greet_s: Seconds = 5.0
    tell_s: Seconds = 0.1  # between two words of how busy a node is
    retry_min_s: Seconds = 0.1  # between two tries to reach a node
    retry_max_s: Seconds = 5.0


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
    prefill_tokens_min: Annotated[int, Within(at_least=0, at_most=1_000_000_000)] = 0  # shorter prompts skip a prefill
    resumes_max: Annotated[int, Within(at_least=0, at_most=1_000)] = 3  # of one request, after the loss of a worker
    crashes_max: Annotated[int, Within(at_least=0, at_most=1_000)] = 1  # of engines under one request
    resume_tokens_max: Count = 65_536  # that were sent before the loss
    resume_s: Seconds = 10.0  # to find another worker


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
    leg: Literal["both", "prefill", "decode"] = "both"
    bootstrap_port: Annotated[int, Within(at_least=1, at_most=65535)] | None = None  # of a prefill, its own on its host
    transfer: str | None = None  # SGLang's way to move KV caches; on a CPU "mooncake_tcp"
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
    cluster: ClusterSection = ClusterSection()
    folder: Path = field(default=Path(), init=False)  # where the file stands
    file: Path = field(default=Path(), init=False)
    joined: tuple[str, ...] = field(default=(), init=False)  # what the command line has added to `cluster.join`

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
        section["join"] = [*section.get("join", ()), *join]
    try:
        cluster = structure(data, Cluster)
        object.__setattr__(cluster, "folder", path.parent)
        object.__setattr__(cluster, "file", path)
        object.__setattr__(cluster, "joined", tuple(join))
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
    if cluster.gateway.node not in cluster.node and not cluster.cluster.join:
        yield Mistake("gateway.node", f"there is no node {cluster.gateway.node}; there is {', '.join(cluster.node)}")
    for name, model in cluster.model.items():
        at = join("model", segment(name))
        if all(engine.model != name for engine in cluster.engine.values()):
            yield Mistake(at, "no engine serves it")
        if not cluster.model_path(name).is_dir():
            yield Mistake(f"{at}.path", f"there is no folder {cluster.model_path(name)}")
        if model.template is not None and not (cluster.folder / model.template).is_file():
            yield Mistake(f"{at}.template", f"there is no file {cluster.folder / model.template}")
    yield from _nodes_disagree(cluster)
    yield from _metrics_disagree(cluster)
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
    object.__setattr__(changed, "file", cluster.file)
    object.__setattr__(changed, "joined", cluster.joined)
    return changed


def _engine_disagrees(cluster: Cluster, engine: EngineSection, at: str) -> Iterator[Mistake]:
    if engine.model not in cluster.model:
        yield Mistake(f"{at}.model", f"there is no model {engine.model}; there is {', '.join(cluster.model)}")
    if engine.node not in cluster.node:
        yield Mistake(f"{at}.node", f"there is no node {engine.node}; there is {', '.join(cluster.node)}")
    yield from _leg_disagrees(cluster, engine, at)
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


def _nodes_disagree(cluster: Cluster) -> Iterator[Mistake]:
    """Yield what keeps two nodes from finding each other."""
    deaf = [name for name, node in cluster.node.items() if node.listen is None]
    for name in deaf[1:]:
        yield Mistake(f"node.{name}.listen", f"is missing: {deaf[0]} does not listen either, so they cannot meet")
    at: dict[str, str] = {}
    for name, node in cluster.node.items():
        if name.startswith(OPERATOR):
            yield Mistake(f"node.{name}", f"is an operator's name: no node's begins with {OPERATOR}")
        if node.listen is not None and (other := at.setdefault(node.listen, name)) != name:
            yield Mistake(f"node.{name}.listen", f"is where {other} listens")
    section = cluster.cluster
    for key in ("secret", "tls_certificate", "tls_key", "tls_authority"):
        file = getattr(section, key)
        if file is not None and not (cluster.folder / file).is_file():
            yield Mistake(f"cluster.{key}", f"there is no file {cluster.folder / file}")
    tls = [key for key in ("tls_certificate", "tls_key", "tls_authority") if getattr(section, key) is not None]
    if tls and len(tls) < 3:
        yield Mistake(f"cluster.{tls[0]}", "means nothing without tls_certificate, tls_key and tls_authority together")
    if section.silent_s < 2 * section.beat_s:
        yield Mistake("cluster.silent_s", f"must be at least two beats of {section.beat_s:g} s")


def _metrics_disagree(cluster: Cluster) -> Iterator[Mistake]:
    """Yield which nodes would tell their numbers where something else of the same host listens."""
    gateway = cluster.gateway
    taken = {(node.host, node.listen): f"node {name} listens" for name, node in cluster.node.items()}
    if gateway.node in cluster.node:
        taken[cluster.node[gateway.node].host, f"{gateway.host}:{gateway.port}"] = "the gateway is"
    for name, node in cluster.node.items():
        if node.metrics is None:
            continue
        if (where := (node.host, node.metrics)) in taken:
            yield Mistake(f"node.{name}.metrics", f"is where {taken[where]}")
        taken[where] = f"node {name} tells its numbers"


def _leg_disagrees(cluster: Cluster, engine: EngineSection, at: str) -> Iterator[Mistake]:
    """Yield what keeps a prefill and a decode from working together."""
    if engine.leg != "both" and not cluster.cluster.join:
        other = "decode" if engine.leg == "prefill" else "prefill"
        if not any(each.model == engine.model and each.leg == other for each in cluster.engine.values()):
            yield Mistake(f"{at}.leg", f"means nothing without an engine of the same model whose leg is {other}")
    if engine.leg == "prefill" and engine.kind == "sglang":
        if engine.bootstrap_port is None:
            yield Mistake(f"{at}.bootstrap_port", "is missing: decodes find a prefill by it")
        place = (_host(cluster, engine), engine.bootstrap_port)
        same = [key for key, each in cluster.engine.items() if (_host(cluster, each), each.bootstrap_port) == place]
        if engine.bootstrap_port is not None and len(same) > 1:
            yield Mistake(f"{at}.bootstrap_port", f"is shared by {' and '.join(same)} on one host")
    elif engine.bootstrap_port is not None:
        yield Mistake(f"{at}.bootstrap_port", "is for a prefill of SGLang")


def _host(cluster: Cluster, engine: EngineSection) -> str | None:
    return cluster.node[engine.node].host if engine.node in cluster.node else None


def _only_sglangs(engine: EngineSection, at: str) -> Iterator[Mistake]:
    for key in ("device", "tensor_parallel", "memory_fraction", "settings", "environment", "transfer"):
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
