"""The interface of a kind of engines to the rest of a node: the types of a row in `kinds.py`.

A node depends on these alone. A kind brings the keys of its section with the checks between them, and makes the
children of its engines; its computing, its processes and its shared parts are its own affair. The rest of a node may
never test for a kind by its name: the properties of an engine before its start are in the engine's section, and those
of a running engine in the engine port.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TypeAlias

from attrs import field, frozen

from actors.engines.slots.slots import ReachPartner
from actors.kit.hand_off import KindHandOff
from protocol.strict.mistakes import Mistake
from supervisor.cluster.directory import Directory
from supervisor.config.schema import Cluster, EngineSection
from supervisor.engines.work import LocalEmbedder, LocalEncoder, LocalEngine
from supervisor.links.serving import Services
from supervisor.processes.output_log import OutputLog, output_writer
from supervisor.runtime import Runtime
from supervisor.supervision.tree import Child, Tree
from supervisor.tensors.shared_memory import SharedMemory


@frozen
class NodeContext:
    """One node as the kinds see it while its children are made."""

    cluster: Cluster
    node: str
    runtime: Runtime
    directory: Directory
    shared: SharedMemory = field()

    @shared.default
    def _shared(self) -> SharedMemory:
        return SharedMemory(self.cluster.node[self.node].shared_bytes_max)

    def output_log(self, process: str) -> OutputLog:
        """Return the log of a process's output: one file and one thread for all of its lives."""
        runtime, section = self.runtime, self.cluster.node[self.node]
        path, logs = runtime.logs / f"{process}.log", runtime.metrics.logs
        if process not in logs:
            logs[process] = output_writer(path)
        return OutputLog(path, persistent=section.logs is not None, file=logs[process])


@frozen
class EngineChild:
    """The child that runs one engine, and how it stands in the tree."""

    child: Child
    about: str  # the device, or the like
    needs: tuple[str, ...] = ()  # the children of the same kind that must be up before it starts
    retry_min_s: float = 0.1  # the least time between a failure and the next start
    reach: ReachPartner | None = None  # of a decode whose engine must not be asked to meet a prefill out of reach


class RetriedChild(Protocol):
    """The registration of a child that comes and goes; it receives the child's failures."""

    def note_failure(self, reason: str, wait_s: float) -> None:
        """Note that the child has failed, and is started again after a wait."""

    def explain_failure(self, reason: str) -> None:
        """Replace the reason of the last failure by that of its cause."""


@frozen
class KindChildren:
    """The children that one kind adds to one node.

    A kind with `encodes` or `embeds` in its section makes the children of encoders or of embedders, too. Children in
    `before` stand before all engines of the node in its tree, children in `after` behind them. `served` are the
    services of its engines beside requests. `published` are the registrations of the children in `before` that come
    and go, by their names.
    """

    engine: Callable[[LocalEngine], EngineChild]
    encoder: Callable[[LocalEncoder], EngineChild] | None = None
    embedder: Callable[[LocalEmbedder], EngineChild] | None = None
    before: tuple[Child | Tree, ...] = ()
    after: tuple[Child | Tree, ...] = ()
    served: Services = field(factory=dict)
    published: Mapping[str, RetriedChild] = field(factory=dict)


MakeChildren: TypeAlias = Callable[[NodeContext], KindChildren]
CheckHost: TypeAlias = Callable[[str, EngineSection], None]
FindMistakes: TypeAlias = Callable[[Cluster, EngineSection, str, Mapping[str, str]], Iterable[Mistake]]
"""Yields what keeps an engine on this host from starting, by keys below a path; the last is the environment."""

RemoveLeftovers: TypeAlias = Callable[[str, int], None]
"""Removes what an engine's process has left elsewhere, by the name of its folder in an open folder; idempotent."""


def _accept_host(name: str, section: EngineSection) -> None:
    """Accept every host."""


def _find_none(_: Cluster, __: EngineSection, ___: str, ____: Mapping[str, str]) -> Iterable[Mistake]:
    """Find no mistake on any host."""
    return ()


def _leave_nothing(_: str, __: int) -> None:
    """Remove nothing: the processes of the kind, if it has any, leave nothing behind."""


@frozen
class EngineKind:
    """One row of `kinds.py`."""

    section: type[EngineSection]  # its `[engine.NAME]`
    children: MakeChildren
    check_host: CheckHost = _accept_host  # raises `StartFailed` if this host lacks what an engine needs
    mistakes_here: FindMistakes = _find_none  # what the section asks for and this host has not
    remove_leftovers: RemoveLeftovers = _leave_nothing
    metrics_prefix: str = ""  # the prefix of its engines' own metrics; empty: they keep none
    hand_off: KindHandOff | None = None  # None: it has no engines that compute one leg
