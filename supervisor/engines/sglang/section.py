"""`[engine.NAME]` of an SGLang engine: its keys, and the checks between keys that are each valid alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

import attrs
from attrs import Factory, frozen

from actors.engines.sglang import arguments, setting_rules
from actors.engines.sglang.boot_message import CPU_PREFILL_CHUNK, default_transfer
from actors.engines.sglang.spec import Setting
from protocol.pairing import Terms
from protocol.strict.checks import Within
from protocol.strict.mistakes import Mistake, join, segment
from supervisor.config import other_words
from supervisor.config.limits import Count
from supervisor.config.schema import Cluster, EngineSection, EventsSection
from supervisor.config.sections import LOOPBACK_HOSTS, WILDCARD_HOSTS, NodeName
from supervisor.engines.sglang import adapters_section, diffusion, embedding
from supervisor.engines.sglang.adapters_section import SglangAdapters
from supervisor.engines.sglang.diffusion import Algorithm, DiffusionSettings
from supervisor.engines.sglang.experts import SglangExperts
from supervisor.links.endpoint import Endpoint

BOOTSTRAP_PORTS = 32  # of a prefill, from `bootstrap_port` on; decodes forget the port of a life 15 s after it
PREFILL_CHUNK = {"cpu": CPU_PREFILL_CHUNK, "cuda": 8192}
"""The chunk of an engine whose section names none; on a GPU SGLang's own depends on its memory."""
CUDA_SILENT_S = 60.0
ZYGOTE_S = 120.0
SHARED_ZYGOTE = "zygote"  # the child that forks the hosts of engines without variables of their own
OWN_ZYGOTE_PREFIX = f"{SHARED_ZYGOTE}-"  # before the name of an engine with variables of its own
CHECKER_PREFIX = "grammars-"  # before the name of an engine: the child that checks its grammars

TOKENS_MIN = 8  # one of a prompt, one of an answer, and six that SGLang keeps
RESERVE = "num_reserved_decode_tokens"
RESERVED_TOKENS = 512  # SGLang's default of that setting: what a decode keeps free for answers when it takes a prompt

WEIGHTS: Mapping[Setting, tuple[str, ...]] = {
    "auto": ("*.safetensors", "*.bin", "*.pt"),
    "safetensors": ("*.safetensors",),
    "fastsafetensors": ("*.safetensors",),
    "instanttensor": ("*.safetensors",),
    "mistral": ("consolidated*.safetensors",),
    "pt": ("*.pt",),
    "npcache": ("*.bin",),
}
"""The files of weights by `load_format`; other formats, `dummy` among them, need none or look for them elsewhere."""

NOT_OF_ENCODERS = (
    "adapters",
    "bootstrap_port",
    "ranks_on",
    "dist_port",
    "transfer",
    "memory_fraction",
    "vision",
    "metrics",
    "experts",
    "diffusion",
)

PORT_MAX = 65535
Port = Annotated[int, Within(at_least=1, at_most=PORT_MAX)]


@frozen(kw_only=True)
class SglangEvents(EventsSection):
    """`[engine.NAME.events]`: the addresses at which anybody may subscribe to the blocks of an SGLang engine."""

    listen: Endpoint | None = None  # address where anybody may subscribe by ZMQ, in SGLang's own form
    replay: Endpoint | None = None  # address where subscribers ask for events that they have missed

    @property
    def endpoints(self) -> Mapping[str, Endpoint]:
        """The addresses that are given, by their keys."""
        given = (("listen", self.listen), ("replay", self.replay))
        return {key: endpoint for key, endpoint in given if endpoint is not None}


@frozen(kw_only=True)
class SglangSection(EngineSection):
    """`[engine.NAME]` with `kind = "sglang"`: one engine, whose ranks run in processes of their own."""

    encodes: ClassVar[bool] = True
    embeds: ClassVar[bool] = True

    ranks_on: tuple[NodeName, ...] = ()  # other nodes with ranks of an engine that spans several; rank 0 is on `node`
    dist_port: Port | None = None  # port of rank 0's host at which the ranks of such an engine meet
    device: Literal["cpu", "cuda"] | None = None  # where it computes; needed
    # first of 32 ports of its host that are its own, by which decodes find a prefill; each start takes another. Engines
    # that `set-role` may make a prefill need it, too
    bootstrap_port: Annotated[int, Within(at_least=1, at_most=65504)] | None = None
    transfer: str | None = None  # SGLang's way to move KV caches from a prefill to a decode; on a CPU `mooncake_tcp`
    tensor_parallel: Count = 1  # devices, or processes on a CPU, that share each layer; of all of its nodes together
    # share of a device's memory for weights and KV memory; by default SGLang's own
    memory_fraction: Annotated[float, Within(above=0, at_most=1)] | None = None
    # whether it has a vision tower or takes embeddings; by default `embeddings` if the file has an encoder of its model
    vision: Literal["tower", "embeddings"] | None = None
    events: SglangEvents = SglangEvents()
    experts: SglangExperts = SglangExperts()
    adapters: SglangAdapters | None = None  # its LoRA adapters; without this table it takes none
    # algorithm by which a diffusion language model fills its blocks; needed for such a model, and for no other
    diffusion: Algorithm | None = None
    diffusion_settings: DiffusionSettings = DiffusionSettings()
    metrics: bool = False  # whether `/metrics` also has SGLang's own metrics of this engine
    # SGLang's own `ServerArgs` by name; those that another key or the engine host decides are refused by name
    settings: dict[str, Setting] = Factory(dict)
    # variables that are set before anything is imported; on a CPU such an engine has a zygote of its own
    environment: dict[str, str] = Factory(dict)

    @classmethod
    def reserves(cls, name: str) -> bool:
        """Whether a name is reserved for a zygote or a grammar checker, the children beside the engines."""
        return name == SHARED_ZYGOTE or name.startswith((OWN_ZYGOTE_PREFIX, CHECKER_PREFIX))

    @classmethod
    def explain_key(cls, key: str) -> str | None:
        """Return where one of SGLang's own arguments belongs."""
        if key not in arguments.TYPES:
            return None
        refused = setting_rules.REFUSED.get(key)
        if refused is None:
            return "it is an argument of SGLang: write it in [engine.NAME.settings]"
        return f"what SGLang has by this name {refused}"

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that run it, in the order of their ranks."""
        return self.node, *self.ranks_on

    @property
    def pages_min(self) -> int:
        """Three, or more small ones, and the reserve of a decode.

        SGLang keeps a page or some tokens, and ends requests without a token where there is only one page more.
        """
        reserve = self.settings.get(RESERVE, RESERVED_TOKENS) if self.leg == "decode" else 0
        tokens = max(3 * self.page_size, TOKENS_MIN) + (reserve if isinstance(reserve, int) else 0)
        return -(-tokens // self.page_size)

    @property
    def weights(self) -> tuple[str, ...]:
        """The patterns of its files of weights, by its format; none if SGLang looks for them elsewhere."""
        named = self.settings.get("load_format", "auto")
        return WEIGHTS.get(named, ()) if isinstance(named, str) else ()  # another check reports what is no text

    @property
    def has_prefix_cache(self) -> bool:
        """Whether it has a cache of earlier prompts' beginnings."""
        return self.settings.get("disable_radix_cache") is not True

    @property
    def admits_by_memory(self) -> bool:
        """Whether a request waits for KV memory: a scheduler ends where two requests of a diffusion model lack some."""
        return super().admits_by_memory or self.diffusion is not None

    @property
    def shares_memory(self) -> bool:
        """Whether the KV memory of its ranks is shared between keys: other policies have an order of their own."""
        by_policy = self.settings.get("schedule_policy", "fcfs") == "fcfs"
        return self.admits_by_memory or (super().shares_memory and by_policy)

    @property
    def prefill_chunk_default(self) -> int:
        """The prompt tokens of one engine step where `prefill_chunk` is not given."""
        return PREFILL_CHUNK.get(self.device or "", 0)

    @property
    def ports(self) -> Mapping[str, range]:
        """Its own ports on its node's host, by the key of the first one."""
        given = (("bootstrap_port", self.bootstrap_port, BOOTSTRAP_PORTS), ("dist_port", self.dist_port, 1))
        own = {key: range(first, first + count) for key, first, count in given if first is not None}
        ranks = self.data_parallel
        events = {f"events.{key}": range(at.port, at.port + ranks) for key, at in self.events.endpoints.items()}
        return {**own, **events}

    @property
    def silent_default_s(self) -> float:
        """The longest silence where `silent_s` is not given: with CUDA a step may wait for the driver, or for files."""
        return CUDA_SILENT_S if self.device == "cuda" else super().silent_default_s

    @property
    def hand_off_terms(self) -> Terms:
        """The terms of SGLang's hand-off as well, as far as the file has them."""
        device, dtype = self.device, self.settings.get("kv_cache_dtype", "auto")
        places = () if device is None else (("device", device), ("transfer", self.transfer or default_transfer(device)))
        return *super().hand_off_terms, *places, *(() if dtype == "auto" else (("kv_cache_dtype", str(dtype)),))

    @property
    def fixed_ports(self) -> Mapping[str, int]:
        """The port where the ranks meet, which must be free when the engine starts."""
        return {} if self.dist_port is None else {"dist_port": self.dist_port}

    @property
    def imports_s(self) -> float:
        """The seconds that a zygote may take to import SGLang: on a CPU a node has one."""
        return ZYGOTE_S if self.device == "cpu" else 0.0

    @property
    def in_host_memory(self) -> bool:
        """Whether its weights and its KV memory are in the host's memory."""
        return self.device == "cpu"

    def has_tower(self, cluster: Cluster) -> bool:
        """Whether an engine that computes tokens takes pixels, if its model takes any: decided here and nowhere else.

        A node that joins a cluster may not know the encoders of the others; then the key `vision` tells it.
        """
        return not cluster.encodes(self.model) if self.vision is None else self.vision == "tower"

    # What is wrong -----------------------------------------------------------------------

    def mistakes(self, cluster: Cluster, path: str) -> Iterator[Mistake]:
        """Yield the mistakes in this section at `path`, by itself and beside other engines of the cluster."""
        if self.device is None:
            yield Mistake(f"{path}.device", 'is missing; expected "cpu" or "cuda"')
        yield from self._bootstrap_mistakes(cluster, path)
        yield from self._rank_mistakes(cluster, path)
        yield from self._vision_mistakes(cluster, path)
        yield from self._event_mistakes(path)
        yield from embedding.mistakes(self, path)
        yield from self.experts.mistakes(f"{path}.experts", self.device, self.tensor_parallel, self.settings)
        yield from adapters_section.mistakes(self.adapters, self.settings, self.device, path)
        own = self.diffusion, self.diffusion_settings
        yield from diffusion.mistakes(*own, self, self.settings, path, has_adapters=self.adapters is not None)
        for key, endpoint in self.events.endpoints.items():
            if ":" in endpoint.host or not endpoint.host:
                yield Mistake(f"{path}.events.{key}", f"is {endpoint}, and SGLang publishes at IPv4 addresses only")
        for key, value in self.settings.items():
            why = setting_rules.setting_mistake(key, value)
            if why is not None:
                if key not in arguments.TYPES and (meaning := other_words.meant(key, "engine.NAME.settings")):
                    why = f"is no argument of SGLang; {meaning}"
                yield Mistake(join(f"{path}.settings", segment(key)), why)
        if self.device == "cpu" and self.settings.get("enable_memory_saver") is True:
            yield Mistake(f"{path}.settings.enable_memory_saver", 'needs device = "cuda": no memory is given back here')
        for name in self.environment:
            if not name or "=" in name:
                yield Mistake(f"{path}.environment{segment(name)}", "is no name of a variable")

    def _event_mistakes(self, path: str) -> Iterator[Mistake]:
        """Yield what keeps others from subscribing to its blocks."""
        given = self.events.endpoints
        if self.leg in {"decode", "encode"}:
            for key in given:
                yield Mistake(
                    f"{path}.events.{key}", f"is for engines with a prefix cache, and {path}.leg is {self.leg}"
                )
        elif [*given] == ["replay"]:
            yield Mistake(f"{path}.events.replay", "means nothing without listen")
        elif given and self.events.publish is False:
            yield Mistake(f"{path}.events.publish", "is false, and events.listen publishes them")
        for key, endpoint in given.items():
            if (last := endpoint.port + self.data_parallel - 1) > PORT_MAX:
                yield Mistake(f"{path}.events.{key}", f"leaves no port for each rank: the last would be {last}")

    def _bootstrap_mistakes(self, cluster: Cluster, path: str) -> Iterator[Mistake]:
        """Yield what keeps the decodes of a prefill from finding it."""
        key = f"{path}.bootstrap_port"
        if self.bootstrap_port is None:
            if self.leg == "prefill":
                yield Mistake(key, "is missing: decodes find a prefill by it")
        elif self.leg != "encode":
            first, host = self.bootstrap_port, cluster.host_of(self)
            engines = cluster.engines_of(SglangSection).items()
            ports = {name: engine.bootstrap_port for name, engine in engines if cluster.host_of(engine) == host}
            near = [name for name, port in ports.items() if port is not None and abs(port - first) < BOOTSTRAP_PORTS]
            if len(near) > 1:
                yield Mistake(
                    key, f"is shared by {' and '.join(near)} on one host, where each has {BOOTSTRAP_PORTS} ports"
                )

    def _vision_mistakes(self, cluster: Cluster, path: str) -> Iterator[Mistake]:
        """Yield what keeps the engines of a model from taking the same items, or is not for an encoder."""
        if self.leg == "encode":
            fields = attrs.fields_dict(type(self))
            for key in NOT_OF_ENCODERS:
                if getattr(self, key) != fields[key].default:
                    yield Mistake(f"{path}.{key}", f"is for engines that compute tokens, and {path}.leg is encode")
            if self.tensor_parallel > 1:
                yield Mistake(f"{path}.tensor_parallel", "an encoder has one rank")
            return
        if self.vision is None:
            return
        key, has_tower = f"{path}.vision", self.has_tower(cluster)
        if not has_tower and not cluster.encodes(self.model) and not cluster.cluster.join:
            yield Mistake(key, f"nothing makes embeddings: there is no engine of {self.model} whose leg is encode")
        for name, other in cluster.engines_of(SglangSection).items():
            of_model = other.model == self.model and other.leg != "encode"
            if of_model and other.has_tower(cluster) != has_tower:
                takes = "embeddings" if has_tower else "pixels"
                yield Mistake(key, f"engine {name} of the same model takes {takes}, and a request may go to either")
                break

    def _rank_mistakes(self, cluster: Cluster, path: str) -> Iterator[Mistake]:
        """Yield what keeps the ranks of an engine from being one, on however many nodes they are."""
        nodes, stages = len(self.nodes), self.settings.get("pp_size", 1)
        ranks = self.tensor_parallel * (stages if isinstance(stages, int) else 1)
        if self.device == "cpu" and ranks != nodes:
            yield Mistake(f"{path}.tensor_parallel", f"an engine on a CPU has one rank a node, which are {nodes} here")
        elif ranks % nodes:
            yield Mistake(f"{path}.tensor_parallel", f"makes {ranks} ranks, which {nodes} nodes cannot share equally")
        if nodes > 1:
            yield from self._span_mistakes(cluster, path)
        elif self.dist_port is not None:
            yield Mistake(f"{path}.dist_port", "means nothing without ranks_on")

    def _span_mistakes(self, cluster: Cluster, path: str) -> Iterator[Mistake]:
        """Yield the obstacles to the meeting of an engine's nodes."""
        if self.data_parallel > 1:
            yield Mistake(f"{path}.data_parallel", "is for an engine on one node, without ranks_on: name more engines")
        for index, name in enumerate(self.ranks_on):
            if name not in cluster.node:
                yield Mistake(
                    f"{path}.ranks_on[{index}]", f"there is no node {name}; there is {', '.join(cluster.node)}"
                )
            elif name in self.nodes[: index + 1]:
                yield Mistake(f"{path}.ranks_on[{index}]", f"node {name} has a rank of it already")
        hosts = {name: cluster.node[name].host for name in self.nodes if name in cluster.node}
        alone = [name for name, host in hosts.items() if host in (*LOOPBACK_HOSTS, *WILDCARD_HOSTS)]
        if alone and len({"localhost" if host in LOOPBACK_HOSTS else host for host in hosts.values()}) > 1:
            yield Mistake(
                f"node.{alone[0]}.host", f"is {hosts[alone[0]]}, where ranks on other hosts do not find its own"
            )
        if self.dist_port is None:
            yield Mistake(f"{path}.dist_port", "is missing: the ranks meet there, on the host of rank 0")
            return
        own = f"{path}.dist_port"
        place = (hosts.get(self.node), self.dist_port)
        others = [key for key, *other in cluster.ports() if key != own and tuple(other) == place]
        if others:
            yield Mistake(own, f"is {' and '.join(others)} on the same host")
