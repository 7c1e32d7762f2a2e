"""The policy `kv`: the worker with the least to compute for a request, by its prefix cache and its queue.

The cost of a worker is the number of prompt tokens to compute before its answer. A worker that computes prompts has the
uncached tokens of this prompt and the tokens of its waiting prompts. The former count several times: they are saved if
the request goes elsewhere, and the latter are computed anyway. A worker that computes answers has some tokens for each
running request, and as many for the promised share of its KV memory. Among costs within a page of the least one is
drawn at random: several routers, without each other's latest choices, would all choose the same worker otherwise.

    cost = uncached_weight * uncached + queued_weight * queued       (unless it is a decode)
         + load_tokens * (running + slots * share of KV memory)      (unless it is a prefill)
         + KV memory                                                 (if the request does not fit)
         - session_tokens                                            (at the session's last worker)

A few workers of any number are compared: the holders of the prompt's longest prefixes, the workers that compute such a
prompt now, the worker of the session's last request, and the least loaded ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from math import exp
from typing import Annotated, NamedTuple

from attrs import define, field, frozen

from actors.routing.candidates import COMPARED_MAX, LEADING_MAX, Candidates, Chance, Choice
from actors.routing.load import Load
from actors.routing.policies.kv.expected import ExpectedPrefix, ExpectedPrefixes
from actors.routing.policies.kv.index import BLOCKS_MAX, Holder, Match, PrefixIndex
from actors.routing.policies.kv.recent import RecentBlocks
from actors.routing.policies.session import SessionWorkers
from protocol.block_hashes import block_hashes_after
from protocol.cost import kv_tokens
from protocol.messages.cluster import RANK_MARK, Leg, engine_and_rank
from protocol.messages.generation import Generate, PromptBlocks
from protocol.strict.checks import Within
from protocol.token_ids import TokenIds

HOLDERS_MAX = 8  # compared workers with the longest prefixes of a prompt
LEAST_LOADED_MAX = 4  # compared least loaded workers, more only until one has memory for the request

ANSWER_BLOCKS_MAX = 512  # blocks hashed, in some 0.6 ms; a longer answer is found once its events have come

Weight = Annotated[float, Within(at_least=0, at_most=1e6)]


@frozen(kw_only=True)
class KvSettings:
    """`[model.NAME.kv]`: costs of the policy `kv`, in prompt tokens, and the size of its index."""

    uncached_weight: Weight = 4.0  # cost of each prompt token that the worker's cache does not have
    queued_weight: Weight = 1.0  # cost of each prompt token that is to be computed there before
    # cost of a running request, and of a slot's share of KV memory; higher values spread requests more
    load_tokens: Weight = 256.0
    session_tokens: Weight = 256.0  # cost by which the worker of the session's last request is preferred
    # randomness of the choice: temperature of a softmax over costs; 0 takes the least cost
    temperature: Annotated[float, Within(at_least=0, at_most=100)] = 0.0
    # blocks in the index of a gateway, some 240 bytes each; then the least recently used one is dropped
    blocks_max: Annotated[int, Within(at_least=256, at_most=100_000_000)] = BLOCKS_MAX


@define(eq=False)
class KvPolicy:
    """The policy with its index, and with the requests in flight."""

    settings: KvSettings
    index: PrefixIndex
    chance: Chance
    now: Callable[[], float]  # in seconds
    expected: ExpectedPrefixes = field(factory=ExpectedPrefixes)
    recent: RecentBlocks = field(init=False)
    sessions: SessionWorkers = field(factory=SessionWorkers)

    def __attrs_post_init__(self) -> None:
        self.recent = RecentBlocks(self.now)
        self.index.on_stored = self.recent.reported

    def __call__(self, request: Generate, candidates: Candidates, /) -> Choice | None:
        """Return the worker of the least cost, with the expected tokens in its cache."""
        hints = request.hints
        session = "" if hints is None else hints.session
        prompt = _Prompt.of(request, self.index, self.expected, self.recent)
        homes = self._homes(session)
        loads = self._compared(candidates, prompt, homes.values())
        if not loads:
            return None
        weighed = [self._weighed(load, prompt) for load in loads]
        costs = [each.cost for each in weighed]
        if homes:
            self._prefer_home(costs, loads, homes)
        chosen = weighed[self._drawn(loads, costs, prompt.page_size)]
        take = partial(self._take, request, chosen.load, prompt, session)
        compared = tuple(zip((load.name for load in loads[:COMPARED_MAX]), costs, strict=False))
        return Choice(
            chosen.load, chosen.overlap, chosen.cached, chosen.cost, prompt.blind, compared=compared, on_taken=take
        )

    def _homes(self, session: str) -> dict[Leg, str]:
        """Return the workers that served a session last, by their legs."""
        if not session:
            return {}
        return {leg: name for leg in Leg if (name := self.sessions.get(leg, session)) is not None}

    def _take(self, request: Generate, load: Load, prompt: _Prompt, session: str) -> _TakenPrompt | None:
        """Record the worker of the session, and follow the prompt that it computes."""
        if session:
            self.sessions.set(load.leg, session, load.name, request.owner)
        if load.leg is Leg.DECODE or not prompt.matches:
            return None
        return _TakenPrompt(self, request, load, prompt)

    def _compared(self, candidates: Candidates, prompt: _Prompt, homes: Iterable[str]) -> list[Load]:
        """Return the candidates that are compared, each once."""
        compared = dict[str, Load]()
        for engine, rank in prompt.holders(HOLDERS_MAX):
            if rank or engine not in compared:
                load = _find_holder(candidates, engine, rank)
                if load is not None:
                    compared.setdefault(load.name, load)
        for name in (*prompt.expected, *homes):
            if name not in compared and (load := candidates.find(name)) is not None:
                compared[name] = load
        for load in _leading(candidates, prompt):
            compared.setdefault(load.name, load)
        return list(compared.values())

    def _weighed(self, load: Load, prompt: _Prompt) -> _Weighed:
        """Weigh a worker; called some ten times a choice, so every call in it counts."""
        settings, leg, kv_tokens_max = self.settings, load.leg, load.kv_tokens_max
        cost, overlap, cached = 0.0, 0, 0
        if leg is not Leg.DECODE:
            overlap, cached = prompt.overlap(load)
            cost += settings.uncached_weight * (prompt.tokens - overlap) + settings.queued_weight * load.queued
        held = load.kv_tokens + prompt.needed(leg) - cached if kv_tokens_max else 0  # 0: unknown
        if leg is not Leg.PREFILL:
            kv_share = min(1.0, held / kv_tokens_max) if kv_tokens_max else 0.0
            cost += settings.load_tokens * (load.busy + load.slots * kv_share)
        if held > kv_tokens_max:  # it would wait there for memory, behind all other requests
            cost += kv_tokens_max
        return _Weighed(load, overlap, cached, cost)

    def _prefer_home(self, costs: list[float], loads: Sequence[Load], homes: Mapping[Leg, str]) -> None:
        """Lower the cost of the session's last worker."""
        at_home = [index for index, load in enumerate(loads) if homes.get(load.leg) == load.name]
        if at_home:
            costs[at_home[-1]] -= self.settings.session_tokens

    def _drawn(self, loads: Sequence[Load], costs: Sequence[float], page_size: int) -> int:
        """Return the index of one of the workers: of the least cost, or by the softmax of their costs."""
        least, most = min(costs), max(costs)
        if self.settings.temperature > 0 and most > least:
            scale = self.settings.temperature * (most - least)
            return _draw([exp((least - its_cost) / scale) for its_cost in costs], self.chance())
        near = [index for index, its_cost in enumerate(costs) if its_cost < least + page_size]
        if len(near) == 1:
            return near[0]
        near.sort(key=lambda index: loads[index].name)
        return near[int(self.chance() * len(near))]


class _Weighed(NamedTuple):
    """A compared worker with its cost, and the prompt tokens in its cache: expected, and there already."""

    load: Load
    overlap: int
    cached: int
    cost: float


@define(eq=False)
class _Prompt:
    """A prompt with its matches in the index, in tokens."""

    matches: tuple[tuple[PromptBlocks, Match], ...]
    expected: dict[str, int]  # the tokens in common with a prompt in flight, by worker
    tokens: int
    tokens_with_answer: int  # the most of KV memory that it may come to need with its answer
    blind: bool  # some worker has not reported all its blocks yet
    recent: RecentBlocks

    @classmethod
    def of(cls, request: Generate, index: PrefixIndex, expected: ExpectedPrefixes, recent: RecentBlocks) -> _Prompt:
        blocks = () if request.hints is None else request.hints.blocks
        common = dict[str, int]()
        for paged in blocks:
            for worker, count in expected.blocks(paged.hashes).items():
                common[worker] = max(common.get(worker, 0), count * paged.page_size)
        matches = tuple((paged, index.match(paged.hashes)) for paged in blocks)
        with_answer = kv_tokens(request, Leg.BOTH, 0)
        return cls(matches, common, len(request.tokens), with_answer, bool(index.unknown), recent)

    @property
    def page_size(self) -> int:
        return min((blocks.page_size for blocks, _ in self.matches), default=1)

    def needed(self, leg: Leg) -> int:
        """Return the tokens of KV memory that it may come to need of a leg with nothing in its cache."""
        return self.tokens if leg is Leg.PREFILL else self.tokens_with_answer

    def holders(self, holders_max: int) -> list[Holder]:
        """Return the holders of the longest prefixes, and the holders of recent blocks behind these."""
        found = list[Holder]()
        for blocks, match in self.matches:
            found += match.longest(holders_max)
            for count in {0, *(count for count, _ in match.groups)}:
                if count < len(blocks.hashes) and (bits := self.recent.holders(blocks.hashes[count])):
                    found += islice(match.named(bits), holders_max)
        return found

    def matches_at(self, load: Load) -> Sequence[tuple[PromptBlocks, Match]]:
        """Return the matches of a worker's own page size, or all while that is unknown."""
        if not load.page_size:
            return self.matches
        return [(blocks, match) for blocks, match in self.matches if blocks.page_size == load.page_size]

    def overlap(self, load: Load) -> tuple[int, int]:
        """Return the numbers of its tokens in a worker's cache, expected when its turn comes, and there now."""
        computing, holder = self.expected.get(load.name, 0), engine_and_rank(load.name)
        overlap = cached = 0
        for blocks, match in self.matches_at(load):
            size, bit = blocks.page_size, match.bits.get(holder, 0)
            reusable = (self.tokens - 1) // size * size  # the last token of a prompt is always computed
            here = min(reusable, size * self.recent.extend(bit, blocks.hashes, match.blocks_of(bit))) if bit else 0
            cached = max(cached, here)
            if computing > here:
                here = min(reusable, computing // size * size)
            overlap = max(overlap, here)
        return overlap, cached


@define(eq=False)
class _TakenPrompt:
    """A prompt that a worker computes: expected in its cache at once, and for a moment after it is there."""

    policy: KvPolicy
    request: Generate
    load: Load
    prompt: _Prompt
    _matches: Sequence[tuple[PromptBlocks, Match]] = field(init=False)
    _prefixes: list[ExpectedPrefix | None] = field(init=False)  # one for each page size, none once it has begun
    _bit: int = field(init=False, default=0)  # the bit of the cache with the prompt

    def __attrs_post_init__(self) -> None:
        expected, name = self.policy.expected, self.load.name
        self._matches = self.prompt.matches_at(self.load)
        self._prefixes = [expected.add(name, blocks.hashes) for blocks, _ in self._matches]

    @property
    def _holder(self) -> Holder:
        return engine_and_rank(self.load.name)

    def begun(self) -> None:
        self.ended()
        for blocks, _ in self._matches:
            bit, reported = self.policy.index.reported(*self._holder, blocks.hashes)  # the beginning may be by now
            if bit:
                self._bit = bit
                self.policy.recent.add(bit, blocks.hashes, reported)

    def answered(self, ids: Sequence[int]) -> None:
        """Expect the computed part of the answer in the cache."""
        if self.load.leg is not Leg.BOTH:
            return
        tokens = self.request.tokens
        for blocks, match in self._matches:
            size, bit = blocks.page_size, match.bit(*self._holder)
            if not bit or bit != self._bit or len(ids) > ANSWER_BLOCKS_MAX * size:
                continue
            if len(blocks.hashes) == len(tokens) // size:  # else blocks are missing in between
                rest = tokens[len(blocks.hashes) * size :] + TokenIds.of(ids)
                hashes, _ = block_hashes_after(blocks.digest, rest, size)
                _, reported = self.policy.index.reported(*self._holder, hashes)  # by the events of its steps
                self.policy.recent.add(bit, hashes, reported, len(blocks.hashes))

    def ended(self) -> None:
        """Expect it no more; idempotent."""
        for prefix in self._prefixes:
            if prefix is not None:
                self.policy.expected.discard(prefix)
        self._prefixes = []


def _leading(candidates: Candidates, prompt: _Prompt) -> list[Load]:
    """Return the least loaded, up to the first one with memory for the request and no reservation."""
    leading, any_free = list[Load](), False
    for load in islice(candidates, LEADING_MAX):
        leading.append(load)
        fits = not load.kv_tokens_max or load.kv_tokens + prompt.needed(load.leg) <= load.kv_tokens_max
        any_free = any_free or (fits and not load.reserved)
        if any_free and len(leading) >= LEAST_LOADED_MAX:
            break
    return leading


def _find_holder(candidates: Candidates, engine: str, rank: int) -> Load | None:
    """Return the candidate for a rank of an engine, named by the engine alone if it has one rank."""
    if not rank and (load := candidates.find(engine)) is not None:
        return load
    return candidates.find(f"{engine}{RANK_MARK}{rank}")


def _draw(weights: Sequence[float], drawn: float) -> int:
    """Return an index drawn by weight, from a number from 0 to below 1."""
    left = drawn * sum(weights)
    for index, weight in enumerate(weights):
        left -= weight
        if left < 0:
            return index
    return len(weights) - 1
