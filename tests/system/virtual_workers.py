"""Workers in virtual time with a prefix cache, and gateways that route requests to them by the product's own code.

A worker computes one prompt after the other and all answers beside them, at fixed speeds. Its cache drops the blocks
that were used least recently. Each gateway has its own index, which hears of blocks after a delay, and its own view of
loads: its own requests at once, those of others as of the last announcement.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from random import Random
from typing import Any

import trio
from attrs import define, field, frozen

from actors.routing.load import Load
from actors.routing.policies.kv.index import PrefixIndex
from actors.routing.policies.kv.policy import KvPolicy, KvSettings
from actors.routing.policies.row import PolicyContext
from actors.routing.policies.table import POLICIES
from actors.routing.route import FailoverLimits
from actors.routing.routing import Routing
from protocol.messages.adapters import Adapter
from protocol.messages.cluster import Leg
from protocol.messages.generation import Generate, PromptBlocks, RoutingHints, Sampling
from protocol.messages.kv_events import BlockChange, BlockEvent
from protocol.pairing import Pairing
from protocol.token_ids import ID_BYTES, TokenIds
from supervisor.cluster.ranking import SortedRanking

PAGE = 16  # tokens
TOLD_S = 0.05  # between two announcements of a worker's load to the gateways
HEARD_S = 0.005  # until a gateway has heard of a block


@frozen
class Speeds:
    """The speeds of a worker."""

    request_s: float = 0.005  # of a prompt, whatever its length
    prompt_token_s: float = 0.00005
    token_s: float = 0.01  # of an answer


@frozen
class Prompt:
    """A prompt as its blocks alone, and the length of its answer."""

    hashes: tuple[int, ...]
    answer: int

    @property
    def tokens(self) -> int:
        """Its length."""
        return PAGE * len(self.hashes) + 1


@define(eq=False)
class VirtualWorker:
    """A worker: its cache, its queue of prompts, and the requests of each gateway."""

    name: str
    slots: int
    pages: int
    speeds: Speeds
    gateways: Sequence[Gateway] = ()
    cache: OrderedDict[int, None] = field(factory=OrderedDict)
    line: deque[trio.Event] = field(factory=deque)  # of prompts, in the order in which they were asked
    places: trio.Semaphore = field(init=False)
    asked: list[Counts] = field(factory=list)  # by gateway
    told: list[Counts] = field(factory=list)  # what each gateway heard last of the others
    served: int = 0

    def __attrs_post_init__(self) -> None:
        self.places = trio.Semaphore(self.slots)

    def found(self, hashes: Sequence[int]) -> int:
        """Return how many blocks of a prompt are in the cache, from the first one on."""
        return next((number for number, block in enumerate(hashes) if block not in self.cache), len(hashes))

    def store(self, hashes: Sequence[int]) -> None:
        """Put the blocks of a prompt into the cache, drop others for them, and tell the gateways."""
        new = [block for block in hashes if block not in self.cache]
        for block in reversed(hashes):
            self.cache[block] = None
            self.cache.move_to_end(block)
        gone = [self.cache.popitem(last=False)[0] for _ in range(max(0, len(self.cache) - self.pages))]
        events = [BlockEvent(BlockChange.REMOVED, hashes=tuple(gone))] if gone else []
        if new:
            events.append(BlockEvent(BlockChange.STORED, hashes=tuple(new)))
        for gateway in self.gateways if events else ():
            gateway.news.append((trio.current_time() + HEARD_S, self.name, events))

    def connect(self, gateways: Sequence[Gateway]) -> None:
        """Let gateways ask it."""
        self.gateways = gateways
        self.asked, self.told = [Counts() for _ in gateways], [Counts() for _ in gateways]

    def tell(self) -> None:
        """Announce the load to each gateway, without that gateway's own part."""
        for number, own in enumerate(self.asked):
            others = Counts()
            for each in self.asked:
                if each is not own:
                    others.add(each)
            if others != self.told[number]:
                self.told[number] = others
                self.gateways[number].moved(self.name)


@define
class Counts:
    """Requests, the tokens that they may come to, and those of prompts that have not begun."""

    requests: int = 0
    tokens: int = 0
    queued: int = 0
    unstarted: int = 0

    def add(self, other: Counts, sign: int = 1) -> None:
        """Add other counts, or subtract them."""
        self.requests += sign * other.requests
        self.tokens += sign * other.tokens
        self.queued += sign * other.queued
        self.unstarted += sign * other.unstarted


@define(eq=False)
class View:
    """A worker as one gateway sees it: the port that its router asks."""

    worker: VirtualWorker
    gateway: Gateway
    number: int
    full_name: str
    leg: Leg = Leg.BOTH
    info: None = None

    @property
    def load(self) -> Load:
        """Its load: this gateway's requests, and those of others as they were announced last."""
        own, others, worker = self.worker.asked[self.number], self.worker.told[self.number], self.worker
        busy, tokens = own.requests + others.requests, own.tokens + others.tokens
        return Load(
            *(self.full_name, busy, worker.slots, tokens, tokens, worker.pages * PAGE, own.queued),
            own=own.requests,
            unstarted=own.unstarted,
            routers=len(worker.gateways),
            place=self.number,
            queued=own.queued + others.queued,
        )

    @asynccontextmanager
    async def ask(self, request: Generate, credit: int) -> AsyncIterator[Any]:
        """Ask the worker; the answer is a pair of functions, to the first token and to the end."""
        uncached = max(0, len(request.tokens) - request.cached_tokens)
        first = Counts(0, 0, uncached, 1)
        whole = Counts(1, len(request.tokens) + credit)
        self._count(first)
        self._count(whole)
        begun, first_in_line = False, trio.Event()
        self.worker.line.append(first_in_line)  # now: tasks that wait for places go on in any order

        async def begin(prompt: Prompt) -> int:
            nonlocal begun
            worker, speeds = self.worker, self.worker.speeds
            if worker.line[0] is not first_in_line:
                await first_in_line.wait()
            found = worker.found(prompt.hashes)
            await trio.sleep(speeds.request_s + speeds.prompt_token_s * (prompt.tokens - PAGE * found))
            worker.store(prompt.hashes)
            worker.line.popleft()
            if worker.line:
                worker.line[0].set()
            begun = True
            self._count(first, -1)
            worker.served += 1
            return PAGE * found

        try:
            async with self.worker.places:
                yield begin
        finally:
            if not begun:
                self._count(first, -1)
            self._count(whole, -1)
            self.gateway.wake()

    def begun(self, request_id: str) -> None:
        """The first token is there; the worker has counted it."""

    def _count(self, counts: Counts, sign: int = 1) -> None:
        self.worker.asked[self.number].add(counts, sign)
        self.gateway.moved(self.full_name)


@define(eq=False)
class Gateway:
    """A gateway's router, by the product's code, with its index and its pool."""

    number: int
    policy: str
    settings: KvSettings
    of: Sequence[VirtualWorker]
    chance: Random
    index: PrefixIndex = field(init=False)
    routing: Routing = field(init=False)
    news: deque[tuple[float, str, list[BlockEvent]]] = field(factory=deque)
    views: dict[str, View] = field(init=False)
    order: SortedRanking[View] = field(init=False)
    decisions_s: list[float] = field(factory=list)
    told_blocks: int = 0
    _changed: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    def __attrs_post_init__(self) -> None:
        self.views = {each.name: View(each, self, self.number, each.name) for each in self.of}
        unused: Any = None  # the events are applied here, without a subscriber
        made = POLICIES[self.policy].make(PolicyContext(self.chance.random, trio.current_time, unused, self.settings))
        policy, self.order = made.policy, SortedRanking()
        self.index = policy.index if isinstance(policy, KvPolicy) else PrefixIndex(self.settings.blocks_max)
        numbers = count(1)
        self.routing = Routing(self, policy, FailoverLimits(), partial(next, numbers), str, 0, frozenset())
        self.routing.ranked = lambda leg: self.order if leg is Leg.BOTH else SortedRanking()

    def begin(self) -> None:
        """Rank the workers, once all are known."""
        self.order = SortedRanking.of(list(self.views.values()))

    def workers(self) -> list[View]:
        """Return the workers, all of which can be asked."""
        return list(self.views.values())

    def expected(self) -> Mapping[str, Leg]:
        """Return the legs of all workers."""
        return dict.fromkeys(self.views, Leg.BOTH)

    def pairing(self) -> Pairing:
        """Return no pairs: each worker computes both legs."""
        return Pairing.of(())

    def lacking(self, adapter: Adapter) -> None:
        """Return nothing: no worker has an adapter."""

    def weights(self) -> None:
        """Return nothing: all workers have the same weights."""

    async def wait_changed(self) -> None:
        """Wait until a worker may have room."""
        await self._changed.park()

    def wake(self) -> None:
        """Wake those who wait for room."""
        self._changed.unpark_all()

    def moved(self, name: str) -> None:
        """Give a worker whose load has changed its place in the order."""
        if (view := self.order.get(name)) is not None:
            self.order.move(view)

    def hear(self) -> None:
        """Apply the news of blocks that have arrived by now."""
        now = trio.current_time()
        while self.news and self.news[0][0] <= now:
            _, worker, events = self.news.popleft()
            self.index.apply(worker, events)
            self.told_blocks += sum(len(event.hashes) for event in events)

    def choose(self, request: Generate) -> Any:
        """Choose a route, and keep how long it took."""
        self.hear()
        began = time.thread_time()
        route = self.routing.choose(request)
        self.decisions_s.append(time.thread_time() - began)
        return route

    async def answer(self, prompt: Prompt, figures: Figures) -> None:
        """Route one request and see it through."""
        began = trio.current_time()
        request = Generate(
            "0" * 32,
            TokenIds(bytes(ID_BYTES * prompt.tokens)),  # prompts are told apart by their blocks
            Sampling(prompt.answer),
            hints=RoutingHints("", (PromptBlocks(PAGE, prompt.hashes),)),
        )
        while (route := self.choose(request)) is None:
            await self.wait_changed()
            await trio.lowlevel.checkpoint()
        async with route.ask(route.decode, request) as begin:
            found = await begin(prompt)
            route.begun()
            figures.add(prompt.tokens, route.overlap, found, trio.current_time() - began)
            await trio.sleep(prompt.answer * self.of[0].speeds.token_s)
        route.end()


@define(eq=False)
class Figures:
    """The figures of a run."""

    tokens: int = 0
    cached: int = 0
    right: int = 0
    wrong_by_pages: int = 0
    requests: int = 0
    ttft_s: list[float] = field(factory=list)

    def add(self, tokens: int, overlap: int, found: int, ttft_s: float) -> None:
        """Add a request whose first token has come."""
        self.requests += 1
        self.tokens += tokens
        self.cached += found
        self.right += overlap == found
        self.wrong_by_pages += abs(overlap - found) > PAGE
        self.ttft_s.append(ttft_s)
