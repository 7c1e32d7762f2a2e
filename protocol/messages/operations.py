"""Operations of an engine besides generations: its own metrics, checks of grammars, ranks of it on other nodes."""

from __future__ import annotations

from attrs import frozen

from protocol.messages.engine import Done
from protocol.messages.generation import Grammar
from protocol.messages.kind import Kind, Message


@frozen
class GetMetrics(Message):
    """Ask an engine whose info says that it has `metrics` for them; the result is `EngineMetrics`."""


METRICS_PREFIX = "sglang:"
"""The beginning of the name of every metric that an engine reports; no metric of a node begins so."""

METRICS_BYTES_MAX = 1024 * 1024


@frozen
class EngineMetrics(Message):
    """An engine's own metrics in the text format of Prometheus, at most `METRICS_BYTES_MAX` bytes of whole families."""

    text: str
    left_out: int = 0  # series that found no room


@frozen
class CheckGrammar(Message):
    """Compile a grammar and walk it, in a grammar checker of an engine; the result is `GrammarChecked`.

    Checks are fair between `owner`s, the names of clients' keys.
    """

    grammar: Grammar
    owner: str = ""


@frozen
class GrammarChecked(Message):
    """The result of a check of a grammar; times are CPU times."""

    refusal: str = ""  # a sentence for the client; empty: the grammar may be used
    compile_s: float = 0.0
    step_ms: float = 0.0  # the longest step of the walk
    size: int = 0  # of the compiled grammar, in bytes


@frozen
class RunRank(Message):
    """Run one rank of an engine that spans nodes, until the asker cancels or leaves; answered by one `RankStarted`.

    `agreed` is what must be equal in the files of all of its nodes, as JSON by key: each node runs by its own file.
    """

    agreed: dict[str, str]
    bootstrap_port: int | None = None  # of this life of a prefill, one of those that the configuration gives it


@frozen
class RankStarted(Message):
    """The rank is being started, and every process of an earlier one has ended."""


KINDS = (
    Kind(27, RunRank, replies=(RankStarted,), result=Done, first=RankStarted),
    Kind(28, RankStarted),
    Kind(30, CheckGrammar, result=GrammarChecked),
    Kind(31, GrammarChecked),
    Kind(36, GetMetrics, result=EngineMetrics),
    Kind(37, EngineMetrics),
)
