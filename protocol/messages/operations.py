"""Operations of an engine besides generations, a row each, and the checks of grammars and ranks on other nodes.

An *operation* is a task that an operator gives an engine: drop the prefix cache, report metrics. From its row in
`OPERATIONS` come the message on a link, the service of each engine, the question to every engine of the cluster, the
HTTP route with its place in the OpenAPI document, and the word of the command line. An engine has one handler for it,
and lists it in `EngineInfo.operations`.

A node of an older version ends the link when it receives an unknown message. So an operation is asked only of engines
that list it; the exception is a row of every version of the program.
"""

from __future__ import annotations

from collections.abc import Collection

from attrs import frozen

from protocol.messages import adapters, engine_files, experts, memory, profile, role, weights
from protocol.messages.cluster import Leg
from protocol.messages.engine import Done
from protocol.messages.generation import Grammar
from protocol.messages.kind import Kind, Message
from protocol.messages.leaving import MemoryTag
from protocol.messages.operation import EngineOperation, OperationScope

# Operations ---------------------------------------------------------------------------


@frozen
class FlushCache(Message):
    """Drop the prefix cache of an idle engine; the result is `Done`."""


@frozen
class GetMetrics(Message):
    """Ask an engine with `metrics` for them; the result is `EngineMetrics`."""


METRICS_BYTES_MAX = 1024 * 1024


@frozen
class EngineMetrics(Message):
    """An engine's own metrics in the text format of Prometheus, at most `METRICS_BYTES_MAX` bytes of whole families."""

    text: str
    left_out: int = 0  # series without room


OPERATIONS = (
    EngineOperation(
        kind=Kind(9, FlushCache, result=Done),
        name="flush-cache",
        participle="flushed",
        summary="Flush the prefix cache of every engine.",
        within_s=5.0,
        path="/flush_cache",
        methods=("GET", "POST"),
        scope=OperationScope.ALL,
        answer_text="Cache flushed.\n",
        every_version=True,
        needs=(MemoryTag.KV_CACHE,),
    ),
    EngineOperation(
        kind=Kind(36, GetMetrics, result=EngineMetrics),
        result_kind=Kind(37, EngineMetrics),
        name="metrics",
        participle="read",
        summary="The engine's own metrics; `/metrics` has them, too.",
        within_s=1.0,
    ),
    *memory.OPERATIONS,
    *engine_files.OPERATIONS,
    *profile.OPERATIONS,
    *experts.OPERATIONS,
    *adapters.OPERATIONS,
    *weights.OPERATIONS,
    *role.OPERATIONS,
)

OPERATION_OF = {operation.request: operation for operation in OPERATIONS}
"""The rows by the classes of their requests."""

OPERATION_NAMED = {operation.name: operation for operation in OPERATIONS}
"""The rows by the words of the command line."""


def is_for(operation: EngineOperation, leg: Leg) -> bool:
    """Whether an operation is for engines of a leg; embedders carry out none."""
    return leg.generates or (leg is Leg.ENCODE and operation.scope is OperationScope.ALL)


def operation_names(requests: Collection[type[Message]]) -> tuple[str, ...]:
    """Return the names for `EngineInfo.operations`: of the operations with these requests, and of every node's."""
    return tuple(operation.name for operation in OPERATIONS if operation.renews or operation.request in requests)


# Other messages -----------------------------------------------------------------------


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
    size: int = 0  # the compiled grammar in bytes


@frozen
class RunRank(Message):
    """Run one rank of an engine that spans nodes, until the asker cancels or leaves; answered by one `RankStarted`.

    `agreed` has the values that must be equal in the files of all its nodes, as JSON by key: each node runs by its own
    file.
    """

    agreed: dict[str, str]
    bootstrap_port: int | None = None  # this life's port of a prefill, out of its configured range


@frozen
class RankStarted(Message):
    """The rank is starting, and every process of an earlier one has ended."""


KINDS = (
    *(operation.kind for operation in OPERATIONS),
    *(operation.result_kind for operation in OPERATIONS if operation.result_kind is not None),
    Kind(27, RunRank, replies=(RankStarted,), result=Done, first=RankStarted),
    Kind(28, RankStarted),
    Kind(30, CheckGrammar, result=GrammarChecked),
    Kind(31, GrammarChecked),
)
