"""The sections of `cluster.toml`, as values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeAlias, TypeVar, get_args

from attrs import Factory, evolve, frozen

from actors.engines.slots import Deadlines
from actors.routing.outliers import Ejection
from actors.routing.policies import POLICIES
from protocol.dialects.options import Holds, Matches, Within
from protocol.strict.checks import OneOf
from protocol.strict.mistakes import Mistake, join, segment
from supervisor.config.certificate import Certificate
from supervisor.config.keyfile import GrammarName
from supervisor.config.limits import Count, GatewayLimits, Seconds, TextLimits
from supervisor.links.endpoint import Endpoint
from supervisor.processes.process import Ladder

NodeName = Annotated[str, Matches(r"[a-z0-9][a-z0-9-]{0,31}", "lower-case letters, digits and dashes")]
EngineName = Annotated[str, Matches(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", "letters, digits, dashes, dots and _")]
LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")
DEFAULT_KIND = "sglang"
"""The kind of an engine whose section names none."""
PolicyName = Annotated[str, OneOf(tuple(POLICIES))]
WILDCARD_HOSTS = ("0.0.0.0", "::", "")  # noqa: S104  # they are recognised here, not bound


@frozen(kw_only=True)
class NodeSection:
    """`[node.NAME]`: one process with one tree."""

    host: str = "localhost"  # the machine it runs on
    listen: Endpoint | None = None  # for other nodes: host:port
    metrics: Endpoint | None = None  # for probes and scrapers: host:port
    drain_s: Seconds = 30.0  # that streams may take to finish after a signal
    logs: str | None = None  # a folder for what engines say; without one it is gone when the node is
    output_log_bytes_max: Count = 4 * 1024 * 1024
    turn_max_s: Seconds = 0.02  # of one step of a task, in which nobody else has the event loop; more is told
    watchdog_s: Seconds = 30.0  # without a turn of its event loop, after which a launcher ends and restarts the node
    log_queue_lines_max: Count = 10_000  # that wait for whoever reads the node's log; more are dropped and counted
    log_queue_bytes_max: Count = 4 * 1024 * 1024

    @property
    def dial_address(self) -> Endpoint | None:
        """Where other nodes reach it, None if it does not listen: at its host, if it listens at every address of it."""
        everywhere = self.listen is not None and self.listen.host in WILDCARD_HOSTS
        return evolve(self.listen, host=self.host) if self.listen is not None and everywhere else self.listen


@frozen(kw_only=True)
class ClusterSection:
    """`[cluster]`: how nodes know each other, and how they keep in touch."""

    name: NodeName = "espalier"
    secret: str | None = None  # a file with what every node of the cluster knows and nobody else
    tls_certificate: str | None = None  # of this host's nodes, shown to the others
    tls_key: str | None = None
    tls_authority: str | None = None  # who must have signed the others' certificates
    tls_names: Literal["hosts", "nodes"] = "hosts"  # "nodes": a certificate must also name the node that shows it
    join: tuple[Endpoint, ...] = ()  # where nodes listen that know of a cluster which this file does not describe
    streams_max: Count = 1024  # that one node may have open on another
    heartbeat_s: Seconds = 1.0
    silent_s: Seconds = 3.0  # after which a silent node is asked nothing, and is lost if its kernel is silent too
    stalled_s: Seconds = 15.0  # after which it is lost though its kernel acknowledges what it is sent
    handshake_s: Seconds = 5.0
    handshakes_max: Count = 32  # connections of other nodes at a time that have not proved yet who they are
    tell_s: Seconds = 0.1  # between two words of how busy a node is
    announcements_max: Count = 500  # such words a second from all nodes together, to one that routes
    retry_min_s: Seconds = 0.1  # between two tries to reach a node
    retry_max_s: Seconds = 5.0

    @property
    def verifies_node_names(self) -> bool:
        """Whether nodes must show certificates that name them."""
        return self.tls_names == "nodes"


@frozen(kw_only=True)
class GatewaySection:
    """`[gateway]`: where clients knock."""

    node: NodeName = "main"
    host: str = "127.0.0.1"
    port: Annotated[int, Within(at_least=0, at_most=65535)] = 8000
    allowed_hosts: tuple[str, ...] = ()  # names of this server, as clients call it; none: loopback's names, and `host`
    allowed_origins: tuple[str, ...] = ()  # of web pages that may use this server, beside its own
    grammars: tuple[GrammarName, ...] = get_args(GrammarName)  # of requests whose key does not say which it may use
    keys: str | None = None  # a file of keys; paths are relative to the file they stand in
    tls_certificate: str | None = None
    tls_key: str | None = None
    requests_max: Count = 256
    waiting_max: Count = 256
    admit_s: Seconds = 5.0
    first_token_s: Seconds = 120.0  # from the client's question on, waiting included
    total_s: Seconds = 900.0
    prompt_tokens_max: Count = 262_144  # of one request, whatever its model would hold
    limits: GatewayLimits = GatewayLimits()
    text: TextLimits = TextLimits()


@frozen(kw_only=True)
class ModelSection:
    """`[model.NAME]`: what is served under a name."""

    path: Annotated[str, Holds(1)]  # a folder; relative to the file it stands in
    template: str | None = None  # a file with a chat template that replaces the model's own
    queue_max: Count = 64  # requests that wait for an engine
    policy: PolicyName = "least_loaded"  # by which a router chooses the worker of a request
    prefill_tokens_min: Annotated[int, Within(at_least=0, at_most=1_000_000_000)] = 0  # shorter prompts skip a prefill
    resumes_max: Annotated[int, Within(at_least=0, at_most=1_000)] = 3  # of one request, after the loss of a worker
    drains_max: Annotated[int, Within(at_least=0, at_most=1_000)] = 64  # losses to drains and replaced links
    crashes_max: Annotated[int, Within(at_least=0, at_most=1_000)] = 1  # of engines under one request
    resume_tokens_max: Count = 65_536  # that were sent before the loss
    resume_s: Seconds = 10.0  # to find another worker
    move_after_s: Seconds = 2.0  # that a request waits at a worker with too much while it could begin elsewhere
    moves_max: Annotated[int, Within(at_least=0, at_most=10)] = 2
    preemptions_max: Annotated[int, Within(at_least=0, at_most=1_000)] = 1  # by engines that go on with others
    ejection: Ejection = Ejection()  # of workers that keep failing


@frozen(kw_only=True)
class EngineSection:
    """`[engine.NAME]`: the keys that every kind of engine has; each kind adds its own in a subclass.

    What the rest of a node must know of an engine before it runs is a property here, and a kind overrides it.
    """

    reads_text: ClassVar[bool] = False  # whether its node needs the model's tokenizer for it

    model: Annotated[str, Holds(1)]
    node: NodeName = "main"
    kind: str = DEFAULT_KIND
    leg: Literal["both", "prefill", "decode"] = "both"
    slots: Count = 16
    kv_tokens_max: Count
    context_max: Count | None = None
    page_size: Count = 16
    prefill_chunk: Count | None = None  # the longest piece of a prompt that an engine step computes
    pending_prefill_tokens_max: Count | None = None  # of prompts inside it without a first token; two chunks
    start_within_s: Seconds = 120.0
    silent_s: Seconds = 10.0  # after which an engine's process that neither answers nor computes is ended
    deadlines: Deadlines = Deadlines()
    ladder: Ladder = Ladder()

    @classmethod
    def reserves(cls, name: str) -> bool:
        """Whether this kind gives a name to a child beside its engines; then no engine of any kind may have it."""
        del name
        return False

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that run it, in the order of their ranks."""
        return (self.node,)

    @property
    def pages_min(self) -> int:
        """The fewest pages of KV memory with which it can answer a request."""
        return 2

    @property
    def prefill_chunk_default(self) -> int:
        """The prompt tokens of one engine step where `prefill_chunk` is not given."""
        return 0

    @property
    def pending_prefill_max(self) -> int:
        """The most prompt tokens that it has before their first tokens, 0 where other engines compute prompts."""
        if self.leg == "decode":
            return 0
        return self.pending_prefill_tokens_max or 2 * (self.prefill_chunk or self.prefill_chunk_default)

    @property
    def ports(self) -> Mapping[str, range]:
        """The ports of its node's host that are its own, by the key that names the first of them."""
        return {}

    @property
    def fixed_ports(self) -> Mapping[str, int]:
        """Those that must be free when the engine starts, by their keys."""
        return {}

    @property
    def imports_s(self) -> float:
        """How long a node may take to import what its engines of this kind need, once for all of them."""
        return 0.0

    @property
    def in_host_memory(self) -> bool:
        """Whether its weights and its KV memory are in the host's memory, in processes of its own."""
        return False

    def mistakes(self, cluster: Cluster, path: str) -> Iterator[Mistake]:
        """Yield what is wrong between keys of this section, at `path`, that are each right by themselves."""
        del cluster, path  # for kinds that have such keys, or ports that other sections may name too
        return iter(())


E = TypeVar("E", bound=EngineSection)
Kinds: TypeAlias = Mapping[str, type[EngineSection]]
"""The section's class of each kind of engine that there is, by the word that `kind` has for it."""


@frozen(kw_only=True)
class Tables:
    """The tables of the file."""

    model: Annotated[dict[str, ModelSection], Holds(1)]
    engine: Annotated[dict[EngineName, EngineSection], Holds(1)]
    node: dict[NodeName, NodeSection] = Factory(lambda: {"main": NodeSection()})
    gateway: GatewaySection = GatewaySection()
    cluster: ClusterSection = ClusterSection()


@frozen(kw_only=True)
class Cluster(Tables):
    """A cluster as its file describes it; the paths in it are relative to `folder`, where the file stands."""

    folder: Path = Path()

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

    def engines_of(self, section: type[E]) -> dict[str, E]:
        """Return the engines of one kind, by its section's class."""
        return {name: engine for name, engine in self.engine.items() if isinstance(engine, section)}

    def host_of(self, engine: EngineSection) -> str | None:
        """Return the host of an engine's first node, None if there is no such node."""
        return self.node[engine.node].host if engine.node in self.node else None

    def ports(self) -> Iterator[tuple[str, str | None, int]]:
        """Yield every port that the file names: its key, its host, itself."""
        for name, node in self.node.items():
            for key, at in (("listen", node.listen), ("metrics", node.metrics)):
                if at is not None:
                    yield f"node.{name}.{key}", node.host, at.port
        if self.gateway.node in self.node:
            yield "gateway.port", self.node[self.gateway.node].host, self.gateway.port
        for name, engine in self.engine.items():
            for key, ports in engine.ports.items():
                for port in ports:
                    yield join(join("engine", segment(name)), key), self.host_of(engine), port

    def follower_ranks_on(self, node: str) -> dict[str, EngineSection]:
        """Return the engines of which a node runs a rank that is not the first."""
        return {name: engine for name, engine in self.engine.items() if node in engine.nodes[1:]}

    def must_meet(self, node: str) -> frozenset[str]:
        """Return the nodes that one needs a link to: the gateway's, and those that have ranks of the same engine."""
        spans = (engine.nodes for engine in self.engine.values() if node in engine.nodes)
        return frozenset({self.gateway.node, *(other for nodes in spans for other in nodes)} - {node})

    def model_path(self, name: str) -> Path:
        """Return the folder of a model."""
        return (self.folder / Path(self.model[name].path).expanduser()).resolve()
