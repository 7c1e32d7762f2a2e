"""Every kind of engine, a row each; CONTRIBUTING.md has the recipe for one more."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from actors.engines import leftover_memory
from actors.engines.sglang import hand_off as sglang_hand_off
from actors.engines.sglang.spec import METRICS_PREFIX
from actors.engines.simulated import hand_off as simulated_hand_off
from actors.engines.trtllm import handed as trtllm_hand_off
from actors.kit.hand_off import KindHandOff
from protocol.errors import HandOffFailed
from protocol.messages.engine import EngineInfo, HandOff
from protocol.strict.mistakes import Mistake, join, segment
from supervisor.config import load
from supervisor.config.load import Examine, Loaded
from supervisor.config.schema import Cluster
from supervisor.engines.kind import EngineKind
from supervisor.engines.sglang import host_checks
from supervisor.engines.sglang.children import sglang_children
from supervisor.engines.sglang.libraries import check_libraries
from supervisor.engines.sglang.section import SglangSection
from supervisor.engines.simulated.children import simulated_children
from supervisor.engines.simulated.section import SimulatedSection
from supervisor.engines.trtllm import host_checks as trtllm_host_checks
from supervisor.engines.trtllm.children import trtllm_children
from supervisor.engines.trtllm.section import TrtllmSection

KINDS: Mapping[str, EngineKind] = {
    "sglang": EngineKind(
        section=SglangSection,
        children=sglang_children,
        check_host=check_libraries,
        mistakes_here=host_checks.mistakes,
        metrics_prefix=METRICS_PREFIX,
        hand_off=sglang_hand_off.HAND_OFF,
        remove_leftovers=leftover_memory.remove,
    ),
    "simulated": EngineKind(
        section=SimulatedSection, children=simulated_children, hand_off=simulated_hand_off.HAND_OFF
    ),
    "trtllm": EngineKind(
        section=TrtllmSection,
        children=trtllm_children,
        mistakes_here=trtllm_host_checks.mistakes,
        hand_off=trtllm_hand_off.HAND_OFF,
        remove_leftovers=leftover_memory.remove,
    ),
}
"""By the word that stands in `[engine.NAME]` as `kind`, which is also the `kind` in the info of its engines."""


def hand_offs() -> Mapping[str, KindHandOff]:
    """Return the hand-offs of the kinds that have one, for routers."""
    return {word: kind.hand_off for word, kind in KINDS.items() if kind.hand_off is not None}


def hand_off_refusal(info: EngineInfo) -> str | None:
    """Return why this node cannot make the hand-off of a prefill; None if it can, or if it makes none."""
    if info.hand_off is not HandOff.CONCURRENT or info.hand_off_address is None:
        return None
    kind = hand_offs().get(info.kind)
    if kind is None or kind.rendezvous is None:
        return f"this node cannot make a hand-off of its kind, {info.kind!r}"
    try:
        kind.rendezvous(info, rank=0, number=0)
    except HandOffFailed as error:
        return str(error)
    return None


def metrics_prefixes() -> tuple[str, ...]:
    """Return the beginnings of the names that engines' own metrics may have."""
    return tuple(kind.metrics_prefix for kind in KINDS.values() if kind.metrics_prefix)


def load_cluster(path: Path, join: Sequence[str] = (), examine: Examine | None = None) -> Loaded:
    """Load a `cluster.toml` whose engines may be of every kind; raises as `load.load` does."""
    return load.load(path, {word: kind.section for word, kind in KINDS.items()}, join, examine)


def read_cluster(path: Path, join: Sequence[str] = (), examine: Examine | None = None) -> Cluster:
    """Return the cluster alone that `load_cluster` loads."""
    return load_cluster(path, join, examine).cluster


def check_host(cluster: Cluster, *nodes: str) -> None:
    """Raise `StartFailed` if this host lacks what an engine of these nodes needs: before anything of it starts."""
    for name, section in cluster.engine.items():
        if not set(nodes).isdisjoint(section.nodes):
            KINDS[section.kind].check_host(name, section)


def mistakes_here(cluster: Cluster, nodes: Collection[str], environment: Mapping[str, str]) -> Iterator[Mistake]:
    """Yield what the engines of these nodes of this host ask for and this host has not."""
    for name, section in cluster.engine.items():
        kind = KINDS[section.kind]
        # An engine whose kind is itself a mistake has the keys of all kinds alone.
        valid = isinstance(section, kind.section) and section.model in cluster.model
        if valid and not {*nodes}.isdisjoint(section.nodes):
            yield from kind.mistakes_here(cluster, section, join("engine", segment(name)), environment)


def remove_leftovers(folder: str, within: int) -> None:
    """Remove what an engine's process has left elsewhere, by the name of its folder in an open folder."""
    for kind in KINDS.values():
        kind.remove_leftovers(folder, within)
