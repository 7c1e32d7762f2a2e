"""The description of an SGLang engine, and its limits for grammars."""

from __future__ import annotations

from typing import TypeAlias

from attrs import Factory, frozen

from actors.engines.adapter_files import AdapterLimits
from protocol.messages.cluster import Leg

METRICS_PREFIX = "sglang:"
"""The beginning of the name of every metric that an engine reports; no metric of a node begins so."""

Setting: TypeAlias = str | int | float | bool | list[str | int] | None


@frozen(kw_only=True)
class GrammarLimits:
    """The limits on the cost of a request's grammar in an engine, and on the grammars checked at a time.

    Times are processor times, not elapsed times.
    """

    compile_s: float = 2.0
    walk_s: float = 0.5  # time for trying tokens: the longer, the more of a grammar is tried
    step_ms: float = 10.0  # time to accept a token and compute the next mask
    bytes_max: int = 2**28  # memory to compile one grammar, or of all compiled ones that are kept
    checks_max: int = 2  # each in a process of its own
    waiting_max: int = 64
    verdicts_max: int = 1024  # verdicts that are kept


@frozen
class SglangSpec:
    """The host of one rank of an engine, as the operator described the engine; sizes in tokens."""

    name: str
    model_path: str
    device: str  # "cpu" or "cuda"
    slots: int
    kv_tokens_max: int
    context_max: int | None = None
    page_size: int = 16
    tensor_parallel: int = 1
    memory_fraction: float | None = None  # share of the device's memory for weights and KV together
    prefill_chunk: int | None = None  # the longest piece of a prompt computed in one step
    leg: Leg = Leg.BOTH
    task: str | None = None  # of an engine whose leg is EMBED: "embed" or "score"
    host: str = "127.0.0.1"  # where other engines reach this one
    bootstrap_port: int | None = None  # a prefill's
    sequential: bool = False  # whether a prefill returns a state, with which the decode is asked
    transfer: str | None = None  # how KV caches move from a prefill to a decode
    nodes: int = 1  # the number of nodes with a host of the engine
    rank: int = 0  # this node's, among them
    dist_init_address: str | None = None  # host:port of rank 0, which the other ranks join
    settings: dict[str, Setting] = Factory(dict)  # SGLang's own arguments, unchanged
    environment: dict[str, str] = Factory(dict)
    grammars: GrammarLimits = GrammarLimits()
    checks_grammars: bool = False  # it runs no engine, but checks grammars for engines like it
    has_tower: bool = True  # whether a vision model's tower is loaded; without it the engine computes with embeddings
    batch_max: int = 0  # items of an encoder's batch
    publishes: bool = False  # whether it publishes the events of its KV memory
    events_address: str | None = None  # host:port, where others than its node may listen for the events
    events_replay_address: str | None = None  # host:port, where they ask for missed events
    metrics: bool = False  # whether it reports SGLang's own metrics
    traces: str | None = None  # the URL to which it exports SGLang's own spans
    adapters: AdapterLimits | None = None  # None: it takes no adapters
    data_parallel: int = 1  # ranks that requests name, each with so many slots and so much KV memory
    files_bytes_max: int = 2**30  # of all files that its operations have left
    experts: dict[str, Setting] = Factory(dict)  # SGLang's arguments about a mixture of experts
    diffusion: str | None = None  # SGLang's algorithm for a diffusion language model; None: it is none
    diffusion_settings: dict[str, Setting] = Factory(dict)  # of that algorithm
    expert_ranks: int = 0  # ranks with an equal share of the experts, whose tokens are recorded; 0: nothing is recorded
