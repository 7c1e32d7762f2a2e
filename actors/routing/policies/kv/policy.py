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

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from math import exp
from typing import Annotated

from attrs import define, evolve, field, frozen

from actors.routing.candidates import LEADING_MAX, Candidates, Chance, Choice
from actors.routing.load import Load
from actors.routing.policies.kv.expected import ExpectedPrefix, ExpectedPrefixes
from actors.routing.policies.kv.index import BLOCKS_MAX, Holder, Match, PrefixIndex
from actors.routing.policies.kv.recent import RecentBlocks
from actors.routing.policies.session import SessionWorkers
from protocol.block_hashes import block_hashes_after
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
        prompt = _Prompt.of(request, self.index, self.expected, self.recent)
        session = "" if hints is None else hints.session
        home = None
        choices = dict[str, Choice]()
        for load in self._compared(request, candidates, prompt, session):
            if load.name not in choices:
                choices[load.name] = self._choice(request, load, prompt)
                if session and self.sessions.get(load.leg, session) == load.name:
                    home = load.name
        if not choices:
            return None
        chosen = self._drawn(list(choices.values()), home, prompt.page_size)
        return evolve(chosen, on_taken=partial(self._take, request, chosen, prompt, session))

    def _take(self, request: Generate, choice: Choice, prompt: _Prompt, session: str) -> _TakenPrompt | None:
        """Record the worker of the session, and follow the prompt that it computes."""
        load = choice.load
        if session:
            self.sessions.set(load.leg, session, load.name, request.owner)
        if load.leg is Leg.DECODE or not prompt.matches:
            return None
        return _TakenPrompt(self, request, load, prompt)

    def _compared(self, request: Generate, candidates: Candidates, prompt: _Prompt, session: str) -> list[Load]:
        """Return the candidates that are compared, some of them twice."""
        names = [*prompt.expected]
        if session:
            names += [name for leg in Leg if (name := self.sessions.get(leg, session)) is not None]
        found = (candidates.find(name) for name in dict.fromkeys(names))
        holders = (_find_holder(candidates, *holder) for holder in prompt.holders(HOLDERS_MAX))
        compared = [load for load in (*holders, *found) if load is not None]
        return compared + _leading(request, candidates)

    def _choice(self, request: Generate, load: Load, prompt: _Prompt) -> Choice:
        settings, cost, overlap, cached = self.settings, 0.0, 0, 0
        if load.leg is not Leg.DECODE:
            overlap, cached = prompt.overlap(load)
            uncached = len(request.tokens) - overlap
            cost += settings.uncached_weight * uncached + settings.queued_weight * load.queued
        if load.leg is not Leg.PREFILL:
            cost += settings.load_tokens * (load.busy + load.slots * _kv_share(load, request, cached))
        if not load.fits(request, cached):  # it would wait there for memory, behind all other requests
            cost += load.kv_tokens_max
        return Choice(load, overlap, cached, cost, prompt.blind)

    def _drawn(self, choices: Sequence[Choice], home: str | None, page_size: int) -> Choice:
        """Return one of the choices: of the least cost, or by the softmax of their costs."""
        preferred = self.settings.session_tokens

        def cost(choice: Choice) -> float:
            return (choice.score or 0.0) - (preferred if choice.load.name == home else 0.0)

        costs = [cost(choice) for choice in choices]
        least, most = min(costs), max(costs)
        if self.settings.temperature > 0 and most > least:
            scale = self.settings.temperature * (most - least)
            return choices[_draw([exp((least - its_cost) / scale) for its_cost in costs], self.chance())]
        near = [choice for choice, its_cost in zip(choices, costs, strict=True) if its_cost < least + page_size]
        near.sort(key=lambda choice: choice.load.name)
        return near[int(self.chance() * len(near))] if len(near) > 1 else near[0]


@frozen
class _Prompt:
    """A prompt with its matches in the index, in tokens."""

    matches: tuple[tuple[PromptBlocks, Match], ...]
    expected: dict[str, int]  # the tokens in common with a prompt in flight, by worker
    reusable: int  # tokens; the last one of a prompt is always computed
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
        return cls(matches, common, len(request.tokens) - 1, bool(index.unknown), recent)

    @property
    def page_size(self) -> int:
        return min((blocks.page_size for blocks, _ in self.matches), default=1)

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
            size = blocks.page_size
            bit = match.bit(*holder)
            cached = max(cached, self.cached(blocks, bit, match.blocks_of(bit)))
            overlap = max(overlap, cached, min(computing // size, self.reusable // size) * size)
        return overlap, cached

    def cached(self, blocks: PromptBlocks, bit: int, reported: int) -> int:
        """Return how many of its tokens are cached by the holder of a bit, given `reported` blocks from its events."""
        size, has = blocks.page_size, self.recent.extend(bit, blocks.hashes, reported)
        return min(has, self.reusable // size) * size


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
            match = self.policy.index.match(blocks.hashes)  # the beginning may be reported by now
            if bit := match.bit(*self._holder):
                self._bit = bit
                self.policy.recent.add(bit, blocks.hashes[match.blocks(*self._holder) :])

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
                reported = self.policy.index.match(hashes).blocks_of(bit)  # by the events of its steps
                self.policy.recent.add(bit, hashes[reported:])

    def ended(self) -> None:
        """Expect it no more; idempotent."""
        for prefix in self._prefixes:
            if prefix is not None:
                self.policy.expected.discard(prefix)
        self._prefixes = []


def _leading(request: Generate, candidates: Candidates) -> list[Load]:
    """Return the least loaded, up to the first one with memory for the request and no reservation."""
    leading, any_free = list[Load](), False
    for load in islice(candidates, LEADING_MAX):
        leading.append(load)
        any_free = any_free or (not load.reserved and load.fits(request))
        if any_free and len(leading) >= LEAST_LOADED_MAX:
            break
    return leading


def _find_holder(candidates: Candidates, engine: str, rank: int) -> Load | None:
    """Return the candidate for a rank of an engine, named by the engine alone if it has one rank."""
    if not rank and (load := candidates.find(engine)) is not None:
        return load
    return candidates.find(f"{engine}{RANK_MARK}{rank}")


def _kv_share(load: Load, request: Generate, cached: int) -> float:
    """Return the share of a worker's KV memory for the largest need of its requests and this one; 0 if unknown."""
    if not load.kv_tokens_max:
        return 0.0
    return min(1.0, load.kv_tokens_with(request, cached) / load.kv_tokens_max)


def _draw(weights: Sequence[float], drawn: float) -> int:
    """Return an index drawn by weight, from a number from 0 to below 1."""
    left = drawn * sum(weights)
    for index, weight in enumerate(weights):
        left -= weight
        if left < 0:
            return index
    return len(weights) - 1
