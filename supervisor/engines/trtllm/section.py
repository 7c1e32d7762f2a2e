"""`[engine.NAME]` of a TensorRT-LLM engine: its keys, and the checks between keys that are each valid alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from attrs import Factory, fields_dict, frozen

from actors.engines.trtllm import setting_rules
from actors.engines.trtllm.boot_message import PREFILL_CHUNK
from actors.engines.trtllm.spec import TrtllmSetting
from protocol.messages.cluster import Leg
from protocol.messages.engine import HandOff
from protocol.pairing import Terms
from protocol.strict.checks import Within
from protocol.strict.mistakes import Mistake, join, segment
from supervisor.config.limits import Count
from supervisor.config.schema import Cluster, EngineSection
from supervisor.engines.trtllm import adapters_section
from supervisor.engines.trtllm.adapters_section import TrtllmAdapters

SILENT_S = 60.0

NOT_OF_ENCODERS = ("adapters", "memory_fraction", "transfer", "releases_memory")
"""The keys of this kind that an encoder does not have, beside those of every kind."""

WEIGHTS = ("*.safetensors", "*.bin")


@frozen(kw_only=True)
class TrtllmSection(EngineSection):
    """`[engine.NAME]` with `kind = "trtllm"`: one engine, in a process of its own on a GPU."""

    encodes: ClassVar[bool] = True

    kind: Literal["trtllm"] = "trtllm"
    device: Literal["cuda"] = "cuda"  # where it computes
    page_size: Count = 32  # tokens of a page of KV memory, a block of the prefix cache; a power of two
    # GPUs that share each layer; with as many ranks of data_parallel, all layers but those of attention
    tensor_parallel: Count = 1
    # interpreter that runs its process, with TensorRT-LLM, attrs and msgspec; by default the node's own
    python: str | None = None
    # share of the free memory of a GPU for KV memory; by default TensorRT-LLM's own
    memory_fraction: Annotated[float, Within(above=0, at_most=1)] | None = None
    # TensorRT-LLM's way to move KV caches from a prefill to a decode
    transfer: Literal["DEFAULT", "UCX", "NIXL", "MPI", "MOONCAKE"] = "DEFAULT"
    # whether release-memory gives back its GPU memory; it then loads the model into memory that can be mapped anew
    releases_memory: bool = False
    adapters: TrtllmAdapters | None = None  # its LoRA adapters; without this table it takes none
    # arguments of TensorRT-LLM's `LLM` by name, fields of its objects as "kv_cache_config.dtype"; those that another
    # key or the engine host decides are refused by name
    settings: dict[str, TrtllmSetting] = Factory(dict)
    # variables that are set before anything is imported
    environment: dict[str, str] = Factory(dict)

    @classmethod
    def explain_key(cls, key: str) -> str | None:
        """Return where one of the arguments of `LLM` belongs."""
        if key not in setting_rules.NAMES:
            return None
        refused = setting_rules.REFUSED.get(key)
        if refused is None:
            return "it is an argument of TensorRT-LLM: write it in [engine.NAME.settings]"
        return f"what TensorRT-LLM has by this name {refused}"

    @property
    def prefill_chunk_default(self) -> int:
        """The prompt tokens of one engine step where `prefill_chunk` is not given."""
        return PREFILL_CHUNK

    @property
    def silent_default_s(self) -> float:
        """The longest silence where `silent_s` is not given: a step may wait for the driver, or for files."""
        return SILENT_S

    @property
    def weights(self) -> tuple[str, ...]:
        """The patterns of its files of weights."""
        return () if self.settings.get("load_format") == "dummy" else WEIGHTS

    @property
    def has_prefix_cache(self) -> bool:
        """Whether it has a cache of earlier prompts' beginnings."""
        return self.settings.get("kv_cache_config.enable_block_reuse") is not False

    @property
    def shares_memory(self) -> bool:
        """Whether its KV memory is shared between keys: only by its admission, since it knows no keys."""
        return self.admits_by_memory

    def has_tower(self, cluster: Cluster) -> bool:
        """Whether an engine that computes tokens takes pixels, if its model takes any."""
        return not cluster.encodes(self.model)

    @property
    def hand_off_terms(self) -> Terms:
        """The terms of its hand-off: as those of every engine, and the way of its KV caches."""
        return *super().hand_off_terms, ("transfer", self.transfer)

    @property
    def hand_offs(self) -> tuple[HandOff, ...]:
        """The prefill first: its decode is asked with the state that the prompt leaves."""
        return (HandOff.SEQUENTIAL,)

    def mistakes(self, cluster: Cluster, path: str) -> Iterator[Mistake]:
        """Yield the mistakes in this section at `path`."""
        del cluster
        yield from self._encoder_mistakes(path)
        if self.data_parallel not in {1, self.tensor_parallel}:
            ranks = (
                f"must be 1 or tensor_parallel, which is {self.tensor_parallel}: its ranks are those that share layers"
            )
            yield Mistake(f"{path}.data_parallel", ranks)
        if self.page_size & (self.page_size - 1):
            yield Mistake(f"{path}.page_size", f"must be a power of two, got {self.page_size}")
        if self.releases_memory and self.worker_leg not in {Leg.BOTH, Leg.ENCODE}:
            legs = 'needs leg = "both": the KV cache of a leg is registered with the transfer once, at its start'
            yield Mistake(f"{path}.releases_memory", legs)
        if self.python is not None and not self.python.strip():
            yield Mistake(f"{path}.python", "is empty; expected the path of an interpreter")
        in_pair = self.leg in {"prefill", "decode"}
        yield from adapters_section.mistakes(
            self.adapters, self.settings, path, in_pair=in_pair, ranks=self.data_parallel
        )
        for name in self.settings:
            if (why := setting_rules.setting_mistake(name)) is not None:
                yield Mistake(join(f"{path}.settings", segment(name)), why)
        for name in self.environment:
            if not name or "=" in name:
                yield Mistake(f"{path}.environment{segment(name)}", "is no name of a variable")

    def _encoder_mistakes(self, path: str) -> Iterator[Mistake]:
        """Yield the keys of an encoder that it does not have."""
        if self.worker_leg is not Leg.ENCODE:
            return
        fields = fields_dict(type(self))
        for key in NOT_OF_ENCODERS:
            if getattr(self, key) != fields[key].default:
                yield Mistake(f"{path}.{key}", f"is for engines that compute tokens, and {path}.leg is encode")
