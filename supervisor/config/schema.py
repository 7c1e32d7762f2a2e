"""The schema of `cluster.toml`: the sections of engines, and the whole file as one immutable value.

This file and `sections.py` describe and do nothing: they may import the value types of other rooms (limits of slots, of
ejections, of processes), but no code that acts by them. Checks between keys are in `checks/`; the keys of one kind of
engine are in that kind's section.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeAlias, TypeVar

from attrs import AttrsInstance, Factory, evolve, frozen

from actors.canary import CanaryLimits
from actors.engines.encoding.limits import BatchLimits
from actors.engines.slots.deadlines import RequestDeadlines
from protocol.messages.cluster import Leg
from protocol.messages.engine import HandOff
from protocol.pairing import Terms
from protocol.strict.checks import Holds, Matches, Within
from protocol.strict.mistakes import Mistake, join, segment
from supervisor.config.certificate import Certificate
from supervisor.config.limits import Count, Seconds
from supervisor.config.pools import POOLS_MAX, PoolName, PoolSection
from supervisor.config.sections import (
    ClusterSection,
    GatewaySection,
    ModelSection,
    NodeName,
    NodeSection,
    TracingSection,
    machine_of,
)
from supervisor.links.endpoint import Endpoint

DATA_PARALLEL_MAX = 128
EngineName = Annotated[str, Matches(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", "letters, digits, dashes, dots and _")]
TaskName: TypeAlias = Literal["generate", "embed", "score"]
LegName: TypeAlias = Literal["both", "prefill", "decode", "encode"]
DEFAULT_KIND = "sglang"
"""The kind of an engine whose section has no `kind`."""


@frozen(kw_only=True)
class EventsSection:
    """`[engine.NAME.events]`: the receivers of the blocks in an engine's prefix cache."""

    # whether gateways are sent the blocks of the prefix cache; by default if the policy of the model is `kv`
    publish: bool | None = None

    @property
    def endpoints(self) -> Mapping[str, Endpoint]:
        """The addresses of rank 0 for external subscribers, by key."""
        return {}


@frozen(kw_only=True)
class EngineSection:
    """`[engine.NAME]`: an engine; each kind adds keys of its own.

    The facts for a node before the engine runs are properties here, which a kind may override.
    """

    reads_text: ClassVar[bool] = False  # whether its node loads the model's tokenizer for it
    encodes: ClassVar[bool] = False  # whether engines of this kind can be encoders
    embeds: ClassVar[bool] = False  # whether engines of this kind can be embedders
    publishes_always: ClassVar[bool] = False  # whether it publishes its blocks under every policy

    model: Annotated[str, Holds(1)]  # name of the model's section
    node: NodeName = "main"  # node that runs the engine; of several nodes, the one with rank 0
    kind: str = DEFAULT_KIND  # `sglang` or `trtllm`, real engines, or `simulated`, an engine without a model
    # what it computes: answers, a vector of each text (`embed`), or a score of each pair of texts (`score`)
    task: TaskName = "generate"
    # part of requests that it computes: all, only prompts, only answers, or embeddings of images and videos
    leg: LegName = "both"
    # ranks: copies of the model, or of its attention (`trtllm`), each a worker with slots, KV memory and a prefix cache
    # of its own
    data_parallel: Annotated[int, Within(at_least=1, at_most=DATA_PARALLEL_MAX)] = 1
    slots: Count = 16  # requests at a time of each rank; further ones wait
    kv_tokens_max: Count = 0  # KV memory of each rank in tokens; needed, but for an encoder
    context_max: Count | None = None  # longest prompt and answer together, in tokens; by default the model's limit
    page_size: Count = 16  # tokens of a page of KV memory, a block of the prefix cache
    # most prompt tokens of an engine step; by default 256 on a CPU and 8,192 on a GPU
    prefill_chunk: Count | None = None
    # most prompt tokens without a first token in a rank; further prompts wait where keys take turns. By default two
    # chunks
    pending_prefill_tokens_max: Count | None = None
    # condition of a request's admission: a slot alone, or KV memory for it as well; by default `memory` if there are
    # several ranks
    admission: Literal["slots", "memory"] | None = None
    start_within_s: Seconds = 120.0  # longest time for a start; then it counts as failed and is tried again
    # longest time of a process without an answer or a computation; then it is killed and started again. By default 10,
    # and 60 on a GPU
    silent_s: Seconds | None = None
    deadlines: RequestDeadlines = RequestDeadlines()
    canary: CanaryLimits = CanaryLimits()
    encoder: BatchLimits = BatchLimits()
    events: EventsSection = EventsSection()

    @classmethod
    def reserves(cls, name: str) -> bool:
        """Whether a name belongs to another child of this kind; then no engine of any kind may have it."""
        del name
        return False

    @classmethod
    def explain_key(cls, key: str) -> str | None:
        """Return where a word belongs that is no key of this section but of this kind's engines, None if nowhere."""
        del key
        return None

    @property
    def worker_leg(self) -> Leg:
        """The leg by which its worker is found."""
        return Leg(self.leg) if self.task == "generate" else Leg.EMBED

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of the engine, in the order of its ranks."""
        return (self.node,)

    @property
    def pages_min(self) -> int:
        """The least number of pages of KV memory to complete a request."""
        return 2

    @property
    def prefill_chunk_default(self) -> int:
        """The prompt tokens of one engine step where `prefill_chunk` is not given."""
        return 0

    @property
    def silent_default_s(self) -> float:
        """The longest silence of its process where `silent_s` is not given."""
        return 10.0

    @property
    def silence_s(self) -> float:
        """The longest silence of its process."""
        return self.silent_default_s if self.silent_s is None else self.silent_s

    @property
    def canary_limits(self) -> CanaryLimits:
        """The limits of its canary, whose answer may take as long as a silence where no time is given."""
        return self.canary if self.canary.within_s is not None else evolve(self.canary, within_s=self.silence_s)

    @property
    def pending_prefill_max(self) -> int:
        """The limit on tokens of its prompts without a first token; 0 for an engine without prompts to answer."""
        if self.worker_leg not in {Leg.BOTH, Leg.PREFILL}:
            return 0
        return self.pending_prefill_tokens_max or 2 * (self.prefill_chunk or self.prefill_chunk_default)

    @property
    def admits_by_memory(self) -> bool:
        """Whether a request waits until its rank has enough KV memory for it; never at a prefill.

        A prefill's memory is free only once a decode has taken the cache, so two requests could deadlock.
        """
        if self.worker_leg not in {Leg.BOTH, Leg.DECODE}:
            return False
        return self.data_parallel > 1 if self.admission is None else self.admission == "memory"

    @property
    def shares_memory(self) -> bool:
        """Whether the KV memory of its ranks is shared between keys, by its admission or inside the engine."""
        return self.leg == "both" or self.admits_by_memory

    @property
    def hand_off_terms(self) -> Terms:
        """The terms of its hand-off, by name, on which both legs of a pair must agree."""
        return ("kind", self.kind), ("page_size", str(self.page_size))

    @property
    def hand_offs(self) -> tuple[HandOff, ...]:
        """The orders in which a pair of its kind can be asked."""
        return HandOff.CONCURRENT, HandOff.SEQUENTIAL

    @property
    def ports(self) -> Mapping[str, range]:
        """The ports that the engine reserves on its host, by the key of the first port."""
        return {}

    @property
    def fixed_ports(self) -> Mapping[str, int]:
        """The ports required to be free at its start, by key."""
        return {}

    @property
    def imports_s(self) -> float:
        """The time to import the libraries of this kind, once for all engines of a node; 0.0 for none."""
        return 0.0

    @property
    def in_host_memory(self) -> bool:
        """Whether a process of its own has its weights and KV memory in the memory of the host."""
        return False

    @property
    def weights(self) -> tuple[str, ...]:
        """The patterns of its files of weights; it reads the files of the first pattern with any; none if none."""
        return ()

    @property
    def has_prefix_cache(self) -> bool:
        """Whether it has a prefix cache: not if its own settings switch the cache off."""
        return True

    def publishes(self, cluster: Cluster) -> bool:
        """Whether it publishes the blocks in its prefix cache; only engines that compute prompts to answer have any."""
        if self.events.endpoints or self.worker_leg not in {Leg.BOTH, Leg.PREFILL}:
            return self.worker_leg in {Leg.BOTH, Leg.PREFILL}
        if self.events.publish is not None:
            return self.events.publish
        if self.publishes_always:
            return True
        return self.model in cluster.model and cluster.model[self.model].follows_blocks

    def mistakes(self, cluster: Cluster, path: str) -> Iterator[Mistake]:
        """Yield contradictions between keys of this section at `path`, and with the rest of the cluster."""
        del cluster, path
        return iter(())


E = TypeVar("E", bound=EngineSection)
Kinds: TypeAlias = Mapping[str, type[EngineSection]]
"""The class of the section of each kind of engine, by the value of `kind`."""


def sections(kinds: Kinds) -> dict[str, tuple[type[AttrsInstance], ...]]:
    """Return the classes of the sections with names, by the table in which these are."""
    return {"model": (ModelSection,), "engine": (*kinds.values(),), "node": (NodeSection,), "pool": (PoolSection,)}


@frozen(kw_only=True)
class Tables:
    """All tables of the file."""

    model: Annotated[dict[str, ModelSection], Holds(1)]
    engine: Annotated[dict[EngineName, EngineSection], Holds(1)]
    node: Annotated[dict[NodeName, NodeSection], Holds(1)] = Factory(lambda: {"main": NodeSection()})
    gateway: GatewaySection = GatewaySection()
    cluster: ClusterSection = ClusterSection()
    tracing: TracingSection = TracingSection()
    pool: Annotated[dict[PoolName, PoolSection], Holds(0, POOLS_MAX)] = Factory(dict)


@frozen(kw_only=True)
class Cluster(Tables):
    """The cluster of a file; its relative paths begin at the file's `folder`."""

    folder: Path = Path()
    processes: dict[str, tuple[str, ...]] = Factory(dict)  # the names of a node's processes, if it runs as several

    @property
    def gateway_nodes(self) -> tuple[str, ...]:
        """The nodes with a gateway."""
        return self.gateway.nodes or (self.gateway.node or "main",)

    def port_sharers(self, node: str) -> tuple[str, ...]:
        """Return the nodes with a gateway on a node's machine, itself included: they share a port."""
        machine = machine_of(self.node[node].host)
        others = (name for name in self.gateway_nodes if name in self.node)
        return tuple(name for name in others if machine_of(self.node[name].host) == machine)

    @property
    def keys(self) -> Path | None:
        """The file of client keys."""
        return None if self.gateway.keys is None else self.folder / self.gateway.keys

    @property
    def certificate(self) -> Certificate | None:
        """The certificate of the gateway, None if clients do not use TLS."""
        certificate, key = self.gateway.tls_certificate, self.gateway.tls_key
        return None if certificate is None or key is None else Certificate(self.folder / certificate, self.folder / key)

    def engines_on(self, node: str) -> dict[str, EngineSection]:
        """Return the engines with rank 0 on a node."""
        return {name: engine for name, engine in self.engine.items() if engine.node == node}

    def with_engine(self, name: str, section: EngineSection) -> Cluster:
        """Return the cluster with another section of one engine."""
        return evolve(self, engine={**self.engine, name: section})

    def engines_of(self, section: type[E]) -> dict[str, E]:
        """Return the engines of one kind, given the class of its section."""
        return {name: engine for name, engine in self.engine.items() if isinstance(engine, section)}

    def encodes(self, model: str) -> bool:
        """Whether a model has encoders for images and videos: then its other engines have no vision tower."""
        return any(engine.model == model and engine.leg == "encode" for engine in self.engine.values())

    def task(self, model: str) -> TaskName:
        """Return what a model computes: the task of all its engines, in a file without mistakes."""
        return next((engine.task for engine in self.engine.values() if engine.model == model), "generate")

    def host_of(self, engine: EngineSection) -> str | None:
        """Return the host of an engine's first node, None if there is no such node."""
        return self.node[engine.node].host if engine.node in self.node else None

    def ports(self) -> Iterator[tuple[str, str | None, int]]:
        """Yield the key, the host and the number of every port in the file."""
        for name, node in self.node.items():
            for key, endpoint in (("listen", node.listen), ("metrics", node.metrics)):
                if endpoint is not None:
                    yield f"node.{name}.{key}", node.host, endpoint.port
        for host in dict.fromkeys(self.node[name].host for name in self.gateway_nodes if name in self.node):
            yield "gateway.port", host, self.gateway.port
        for name, engine in self.engine.items():
            for key, ports in engine.ports.items():
                for port in ports:
                    yield join(join("engine", segment(name)), key), self.host_of(engine), port

    def follower_ranks_on(self, node: str) -> dict[str, EngineSection]:
        """Return the engines with a rank other than 0 on a node."""
        return {name: engine for name, engine in self.engine.items() if node in engine.nodes[1:]}

    def required_peers(self, node: str) -> frozenset[str]:
        """Return the peers that a node needs links to: gateways, and nodes with ranks of the same engines."""
        spans = (engine.nodes for engine in self.engine.values() if node in engine.nodes)
        return frozenset({*self.gateway_nodes, *(other for nodes in spans for other in nodes)} - {node})

    def model_path(self, name: str) -> Path:
        """Return the folder of a model."""
        return (self.folder / Path(self.model[name].path).expanduser()).resolve()
