"""Sessions against a running server: turn by turn, with the accounts of its processes before and after each turn.

All clients of a load send the same turn at once, and the next one when all have their answers. A body is encoded before
the accounts are taken. A server has a moment after the answers for what it does behind them, such as blocks to index.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

import trio
from attrs import define, field, frozen
from tokenizers import Tokenizer

from bench.cost import accounts
from bench.cost.accounts import Accounts, Spent
from bench.load.answers import READERS, Answer
from bench.load.client import BROKEN, Connection, Pool
from bench.load.messages import Api, RequestFailed, Target, os_error_fault
from bench.load.process import Failed
from bench.load.requests import parse_url
from bench.turns.servers import is_engine
from bench.turns.session import Said, Session, body
from bench.turns.text import SourceText

SETTLE_S = 0.1
IDLE_S = 1.0
WARM_UP_TOKENS = 200
COUNTERS = (  # of the tokens that a server took from its cache, and of those that it encoded
    re.compile(
        r"espalier_prompt_cache_tokens_total\{.*result=\"reused\"|dynamo_\w*tokenizer_cache_cached_tokens_total"
    ),
    re.compile(
        r"espalier_prompt_cache_tokens_total\{.*result=\"encoded\"|dynamo_\w*tokenizer_cache_uncached_tokens_total"
    ),
)


@frozen(kw_only=True)
class Load:
    """Sessions of `clients` with so many tokens and messages in their first turn, and `turns` that follow it."""

    api: Api = "chat"
    tokens: int = 45_000
    messages: int = 43
    new_tokens: int = 1000  # of each further turn
    turns: int = 12
    clients: int = 1
    output_tokens: int = 4  # of each answer


@frozen(kw_only=True)
class Turn:
    """One turn of all clients of a load; the first one is number 1, and has nothing of its session cached."""

    number: int
    prompt_tokens: list[int]  # by the server's usage
    cached_tokens: list[int]  # by the same; empty if it tells none
    first_token_ms: list[float]
    groups: dict[str, Spent]
    kept_share: float | None = None  # of its tokens, those not encoded anew, by the server's metrics

    @property
    def gateway_ms(self) -> float:
        """The CPU time of a client's turn in the processes without an engine."""
        return self._cpu_ms(engine=False)

    @property
    def workers_ms(self) -> float:
        """The CPU time of a client's turn in the processes with an engine."""
        return self._cpu_ms(engine=True)

    def _cpu_ms(self, *, engine: bool) -> float:
        spent = (each.cpu_s for name, each in self.groups.items() if is_engine(name) is engine)
        return 1000 * sum(spent) / len(self.first_token_ms)


@frozen(kw_only=True)
class Sample:
    """The result of one load on one server."""

    load: Load
    round: int
    turns: list[Turn]
    idle_ms_a_s: float  # CPU time of the gateway, without any request
    memory_mb: dict[str, float]  # by how much the memory of each group grew from before the first turn to the last


@define(eq=False)
class Client:
    """One session, and its connection."""

    target: Target
    session: Session
    output_tokens: int
    _pool: Pool = field(init=False)
    _previous: str | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self._pool = Pool(self.target, parse_url(self.target.url, self.target.api))

    def begin(self) -> bytes:
        """Return the body of the first turn."""
        return self._body(self.session.begin())

    def grow(self) -> bytes:
        """Return the body of the next turn: over a WebSocket what is new, else the whole conversation."""
        added = self.session.grow()
        return self._body(added if self.target.api == "responses-ws" else self.session.said)

    def _body(self, said: Sequence[Said]) -> bytes:
        return body(self.target.api, self.target.model, said, self.output_tokens, self._previous)

    async def ask(self, text: bytes) -> tuple[Answer, float]:
        """Send a request; return its answer and the time to its first token, in ms. Raises `RequestFailed`."""
        try:
            with trio.fail_after(self.target.timeout_s):
                connection, _ = await self._pool.take()
                return await self._exchange(connection, text)
        except BROKEN as error:
            raise os_error_fault(error, begun=False) from error
        except trio.TooSlowError:
            raise RequestFailed("timeout", "a turn") from None

    async def _exchange(self, connection: Connection, text: bytes) -> tuple[Answer, float]:
        whole = False
        try:
            answer, first_token_ms = await _exchange(connection, text, self.target.api)
            whole = connection.dialogue.reusable
        finally:
            if whole:
                self._pool.give(connection)
            else:
                connection.wire.close()
        if self.target.api == "responses-ws":
            self._previous = answer.response_id
        return answer, first_token_ms

    def close(self) -> None:
        """Close its connection."""
        self._pool.close()


async def _exchange(connection: Connection, text: bytes, api: Api) -> tuple[Answer, float]:
    wire, dialogue, answer, read = connection.wire, connection.dialogue, Answer(), READERS[api]
    data, first_token_ms = dialogue.begin(text), 0.0
    sent_at = time.perf_counter()
    await wire.send(data)
    while not (answer.over and (dialogue.finished or api == "responses-ws")):
        events = dialogue.feed(await wire.receive())
        now = time.perf_counter()
        for name, payload in events:
            if read(answer, name, payload) and not first_token_ms:
                first_token_ms = 1000 * (now - sent_at)
        if dialogue.finished and not answer.over:
            answer.end()
        if dialogue.closed is not None and not answer.over:
            raise dialogue.closed
        if unasked := dialogue.outgoing:
            await wire.send(unasked)
    return answer, first_token_ms


@define(eq=False)
class Drive:
    """One load on one server whose process trees have these roots."""

    load: Load
    target: Target
    roots: Sequence[int]
    tokenizer: Tokenizer
    seed: str
    show: Callable[[Turn], None]
    metrics: Callable[[], str]  # returns the text of the server's metrics
    _clients: list[Client] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._clients = [self._client(number) for number in range(self.load.clients)]

    def _client(self, number: int) -> Client:
        load, source = self.load, SourceText(self.tokenizer, f"{self.seed}/{number}")
        return Client(self.target, Session(source, load.tokens, load.messages, load.new_tokens), load.output_tokens)

    def run(self, number: int) -> Sample:
        """Run the load as this round; raises `Failed`."""
        failed: BaseExceptionGroup[RequestFailed] | None = None
        try:
            return trio.run(self._run, number, strict_exception_groups=True)
        except* RequestFailed as group:
            failed = group
        assert failed is not None
        raise Failed(_first(failed))

    async def _run(self, number: int) -> Sample:
        try:
            async with trio.open_nursery():
                await self._warm_up()
                idle_ms_a_s = await self._idle()
                before = accounts.take(self.roots, memory=True)
                turns = []
                for turn in range(1, self.load.turns + 2):
                    bodies = [each.begin() if turn == 1 else each.grow() for each in self._clients]
                    turns.append(await self._turn(turn, bodies))
                    self.show(turns[-1])
                after = accounts.take(self.roots, memory=True)
        finally:
            for client in self._clients:
                client.close()
        return Sample(
            load=self.load, round=number, turns=turns, idle_ms_a_s=idle_ms_a_s, memory_mb=_grown(before, after)
        )

    async def _warm_up(self) -> None:
        """Let the server answer one short conversation, which shares no beginning with those to come."""
        source = SourceText(self.tokenizer, f"{self.seed}/warm-up")
        client = Client(self.target, Session(source, WARM_UP_TOKENS, 4, WARM_UP_TOKENS), self.load.output_tokens)
        for text in (client.begin, client.grow):
            await client.ask(text())
        client.close()

    async def _idle(self) -> float:
        """Return the CPU time of the gateway while it does nothing, in ms a second."""
        await trio.sleep(SETTLE_S)
        before = accounts.take(self.roots)
        await trio.sleep(IDLE_S)
        spent = accounts.spent(before, accounts.take(self.roots))
        return 1000 * sum(each.cpu_s for name, each in spent.items() if not is_engine(name)) / IDLE_S

    async def _turn(self, number: int, bodies: Sequence[bytes]) -> Turn:
        answered: list[tuple[Answer, float]] = []

        async def ask(client: Client, text: bytes) -> None:
            answered.append(await client.ask(text))

        kept = kept_tokens(self.metrics())
        before = accounts.take(self.roots)
        async with trio.open_nursery() as asking:
            for client, text in zip(self._clients, bodies, strict=True):
                asking.start_soon(ask, client, text)
        await trio.sleep(SETTLE_S)
        spent = accounts.spent(before, accounts.take(self.roots))
        return Turn(
            number=number,
            prompt_tokens=[answer.prompt_tokens for answer, _ in answered if answer.prompt_tokens is not None],
            cached_tokens=[answer.cached_tokens for answer, _ in answered if answer.cached_tokens is not None],
            first_token_ms=[first_token_ms for _, first_token_ms in answered],
            groups=spent,
            kept_share=_kept_share(kept, kept_tokens(self.metrics())),
        )


def kept_tokens(metrics: str) -> tuple[float, float]:
    """Return the tokens of prompts that a server took from its cache, and those that it encoded."""
    sums = [0.0, 0.0]
    for line in metrics.splitlines():
        for place, counter in enumerate(COUNTERS):
            if counter.match(line):
                sums[place] += float(line.rpartition(" ")[2])
    return sums[0], sums[1]


def _kept_share(before: tuple[float, float], after: tuple[float, float]) -> float | None:
    kept, encoded = (now - earlier for earlier, now in zip(before, after, strict=True))
    return kept / (kept + encoded) if kept + encoded else None


def _grown(before: Accounts, after: Accounts) -> dict[str, float]:
    grown: dict[str, float] = {}
    for pid, account in after.items():
        earlier = before[pid].memory_mb if pid in before else 0.0
        grown[account.group] = grown.get(account.group, 0.0) + account.memory_mb - earlier
    return grown


def _first(error: BaseException) -> str:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else str(error)
