"""The stages of a choice by the policy `kv`: the next turn of a conversation, whose prompt several workers have.

One call is all that a router does for a request, from the choice to the end of its answer, without the request itself.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import count, cycle, islice
from random import Random

from attrs import define, evolve, frozen

from actors.kit.calls import Answer
from actors.routing.load import Load
from actors.routing.policies.kv.index import PrefixIndex
from actors.routing.policies.kv.policy import KvPolicy, KvSettings
from actors.routing.route import FailoverLimits
from actors.routing.routing import Routing
from bench.stages.measure import Once, Stage
from bench.stages.model import TOKENS_MAX, generate
from protocol.messages.adapters import Adapter
from protocol.messages.cluster import Leg
from protocol.messages.engine import EngineInfo
from protocol.messages.generation import Finished, FinishReason, Generate, PromptBlocks, RoutingHints, Started, Tokens
from protocol.messages.kv_events import BlockChange, BlockEvent
from protocol.pairing import Pairing
from protocol.token_ids import TokenIds
from supervisor.cluster.ranking import SortedRanking

PROMPT = 128_000  # tokens
PAGE = 16  # tokens
SHARED = 3_200  # tokens of a system prompt, which every worker has
NEW = 960  # tokens of a turn
HOLDERS = 3  # workers with the conversation so far, each with somewhat less of it than the one before
CONVERSATIONS = 4
TURN_S = 1.0


@frozen
class _Worker:
    """A worker that is never asked."""

    load: Load
    leg: Leg = Leg.BOTH
    info: EngineInfo | None = None

    @property
    def full_name(self) -> str:
        return self.load.name

    def begun(self, request_id: str) -> None:
        """Its load stays the same."""

    def ask(self, request: Generate, credit: int) -> AbstractAsyncContextManager[Answer[Started | Tokens, Finished]]:
        raise NotImplementedError


@define(eq=False)
class _Pool:
    """The workers of one model, which never change."""

    every: Sequence[_Worker]

    def workers(self) -> Sequence[_Worker]:
        return self.every

    def expected(self) -> Mapping[str, Leg]:
        return {worker.full_name: worker.leg for worker in self.every}

    def pairing(self) -> Pairing:
        return Pairing.of(())

    def lacking(self, adapter: Adapter) -> Sequence[str]:  # noqa: ARG002  # no adapter is asked for
        return ()

    def weights(self) -> str | None:
        return None

    async def wait_changed(self) -> None:
        raise NotImplementedError

    def wake(self) -> None:
        """Nothing waits."""


def _choice(workers: int) -> Once:
    """Choose workers for the next turns of some conversations, one after the other, and follow each to its end."""
    chance, clock = Random(1), count(step=TURN_S)
    numbers = iter(lambda: chance.getrandbits(62), None)
    loads = (Load(f"node/{number}", chance.randrange(4), 64, kv_tokens_max=2 * 10**6) for number in range(workers))
    every = [_Worker(evolve(load, page_size=PAGE)) for load in loads]
    policy = KvPolicy(KvSettings(), PrefixIndex(), chance.random, lambda: next(clock))
    ranked, none = SortedRanking.of(every), SortedRanking[_Worker].of([])
    routing = Routing(
        _Pool(every),
        policy,
        FailoverLimits(),
        new_number=lambda: 0,
        new_id=str,
        prefill_tokens_min=0,
        ends=frozenset(),
        ranked=lambda leg: ranked if leg is Leg.BOTH else none,
    )
    requests = cycle([*_turns(policy.index, every, numbers, chance)])
    answer = range(TOKENS_MAX)

    def once() -> int:
        route = routing.choose(next(requests))
        assert route is not None
        route.begun()
        route.answered(answer, FinishReason.LENGTH)
        route.end()
        return route.overlap

    return once


def _turns(
    index: PrefixIndex, workers: Sequence[_Worker], numbers: Iterator[int], chance: Random
) -> Iterator[Generate]:
    """Yield a turn of each conversation, whose blocks before it are reported to the index."""
    shared = array("q", islice(numbers, SHARED // PAGE))
    for worker in workers:
        _report(index, worker, shared)
    tokens = TokenIds.of(range(PROMPT))
    for conversation in range(CONVERSATIONS):
        hashes = shared + array("q", islice(numbers, PROMPT // PAGE - len(shared)))
        for holder, worker in enumerate(chance.sample(workers, HOLDERS), start=1):
            _report(index, worker, hashes[: -holder * NEW // PAGE])
        hints = RoutingHints(str(conversation), (PromptBlocks(PAGE, hashes),))
        yield evolve(generate(tokens), hints=hints)


def _report(index: PrefixIndex, worker: _Worker, hashes: Sequence[int]) -> None:
    index.apply(worker.full_name, [BlockEvent(BlockChange.STORED, 0, tuple(hashes))])


def _stage(workers: int) -> Stage:
    return Stage(f"a choice among {workers} workers by kv, of {PROMPT} tokens", lambda _: _choice(workers))


def choice_stages() -> tuple[Stage, ...]:
    """Return the stages, by the number of workers."""
    return tuple(map(_stage, (10, 1_000)))
