"""The targets of what a token and a request cost, and where their figures are in the documents of `make bench-full`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec
from attrs import frozen

from bench.cost.options import STEP_MS
from bench.cost.sample import Sample
from bench.cost.trends import memory_growths
from bench.rig.result import Result
from bench.turns.driving import Load as Session
from bench.turns.report import heading as turns_heading
from bench.versus.ratios import FIGURES, Figure, Pair

SLACK = 1.05  # by which a price may rise from one number of clients to the next and count as flat
CURVE = (1, 8, 64, 256, 1000)  # clients
GATEWAY_GROUP = "node front"  # with a number where it has several processes
WS, CHAT = "responses-ws", "chat"
TOKEN, REQUEST, SPEED = "CPU us a token", "CPU us a request", "tokens/s"
SGLANG, DYNAMO, MOCKER = " x SGLang's server", " x Dynamo", " x Dynamo and its mocker"
ADDED = "Through a node, and the bare engine"


@frozen
class Found:
    """The values of one target; the peer's and ours where it is a ratio of the two."""

    values: Sequence[float]
    theirs: Sequence[float] = ()
    ours: Sequence[float] = ()


Find = Callable[[Result], Found]


@frozen
class Target:
    """One figure that should be at most, or at least, a limit."""

    result: str  # the name of the document that has it
    what: str
    find: Find
    limit: float
    unit: str
    at_least: bool = False
    worst: bool = False  # the worst of the values decides, where none may be beyond the limit; else their median

    @property
    def wanted(self) -> str:
        """The limit in words."""
        return f"{'>=' if self.at_least else '<='} {self.limit:g}{self.unit}"

    def share(self, values: Sequence[float]) -> float:
        """Return the value that decides, over the limit."""
        worst = min if self.at_least else max
        return (worst(values) if self.worst else statistics.median(values)) / self.limit

    def met(self, values: Sequence[float]) -> bool:
        """Whether the values keep the limit."""
        return self.share(values) >= 1 if self.at_least else self.share(values) <= 1


def sides(result: Result) -> tuple[list[Sample], list[Sample]]:
    """Return the samples of the peer and of ours; of `cost` all are ours."""
    if isinstance(result.samples, dict):
        both = msgspec.convert(result.samples, dict[str, list[Sample]])
        return both["theirs"], both["ours"]
    return [], msgspec.convert(result.samples or [], list[Sample])


def ratio(figure: Figure, api: str, clients: int, tokens: int = 128) -> Find:
    """Return a function that takes the ratios of ours to a peer's in one load of `versus`, of all rounds or none."""

    def find(result: Result) -> Found:
        pairs = [
            Pair(theirs, ours)
            for theirs, ours in zip(*sides(result), strict=True)
            if is_load(ours, api, clients) and ours.load.output_tokens == tokens
        ]
        ratios = [value for pair in pairs if (value := pair.ratio(figure)) is not None]
        values = ratios if len(ratios) == len(pairs) else []
        return Found(values, [figure(pair.theirs) for pair in pairs], [figure(pair.ours) for pair in pairs])

    return find


def is_load(sample: Sample, api: str, clients: int) -> bool:
    """Whether a sample is of so many clients of this API."""
    return (sample.load.api, sample.load.clients) == (api, clients)


def longest_gap(result: Result) -> Found:
    """Return the longest gap of each start less the engine's step, in milliseconds."""
    words = list(result.command)
    step_ms = float(words[words.index("--step-ms") + 1]) if "--step-ms" in words else STEP_MS
    return Found([each.gap_max_ms - step_ms for each in sides(result)[1] if is_load(each, WS, 1000)])


def client_memory(clients: int) -> Find:
    """Return a function that takes the memory of a client in the gateway's node, in kB."""

    def find(result: Result) -> Found:
        grown = memory_growths(sides(result)[1])
        return Found([kb[GATEWAY_GROUP] for sample, kb in grown if is_load(sample, WS, clients)])

    return find


def steepest(result: Result) -> Found:
    """Return, for each API, the greatest ratio of the price of a token to that at the next lower number of clients.

    Nothing if an API lacks one of the numbers, since the steep rise may be there.
    """
    prices: dict[str, dict[int, list[float]]] = {}
    for sample in sides(result)[1]:
        of_clients = prices.setdefault(sample.load.api, {})
        of_clients.setdefault(sample.load.clients, []).append(FIGURES[TOKEN](sample))
    if not all(of_clients.keys() >= set(CURVE) for of_clients in prices.values()):
        return Found(())
    medians = [[statistics.median(each[clients]) for clients in sorted(each)] for each in prices.values()]
    return Found([max(after / before for before, after in pairwise(several)) for several in medians])


def gateway_us(sample: Sample) -> float:
    """Return the CPU time of a request in the gateway's nodes alone, in microseconds: the engines' would dilute it."""
    spent = (each.cpu_s for group, each in sample.groups.items() if group.startswith(GATEWAY_GROUP))
    return 1e6 * sum(spent) / sample.requests


def busiest_share(result: Result) -> Found:
    """Return the share of the busier of two gateway processes in what both spent, over an equal share."""
    values = []
    for sample in sides(result)[1]:
        spent = [each.cpu_s for group, each in sample.groups.items() if group.startswith(f"{GATEWAY_GROUP}-")]
        if len(spent) > 1:
            values.append(max(spent) * len(spent) / sum(spent))
    return Found(values)


def of_table(title: str, row: str) -> Find:
    """Return a function that takes the values of one row of a document's own table; raises `KeyError` without it."""

    def find(result: Result) -> Found:
        rows = {(figure.title, str(cells[0])): cells for figure in result.figures for cells in figure.rows}
        theirs, ours, values = (cell if isinstance(cell, list) else [] for cell in rows[title, row][1:4])
        return Found(values, theirs, ours)

    return find


def _turn(tokens: int) -> Target:
    title = turns_heading(Session(tokens=tokens))
    find = of_table(title, "further turns: gateway CPU ms")
    return Target(f"turns-{tokens // 1000}k", f"CPU ms of an agent's turn, gateway, {title}", find, 1.0, DYNAMO)


def _price(where: str, api: str, clients: int) -> tuple[str, Find]:
    return f"{TOKEN} outside the scheduler, {clients} clients, {api}{where}", ratio(FIGURES[TOKEN], api, clients)


def _speed(api: str) -> tuple[str, Find]:
    return f"{SPEED}, real engine, 64 clients, {api}", ratio(FIGURES[SPEED], api, 64)


def _mocked(figure: str, clients: int, tokens: int) -> tuple[str, Find]:
    what = f"{figure}, simulated engine, all processes, chat, {clients} clients, {tokens} tokens"
    return what, ratio(FIGURES[figure], CHAT, clients, tokens)


def _burst(figure: str) -> tuple[str, Find]:
    return f"{figure}, 128 clients ask at once, chat", ratio(FIGURES[figure], CHAT, 128, 16)


def _memory(clients: int) -> tuple[str, Find]:
    what = f"memory of a WebSocket with a request in the gateway's node, {clients:,} clients"
    return what, client_memory(clients)


FIRST_TOKEN = "added to the first token, one client, over the bare engine"
LONGEST_GAP = "longest gap beyond the engine's step, 1,000 WebSocket clients, 20 tokens/s each"
STEEPEST = "steepest rise of the CPU time a token from 1 to 8, 64, 256, 1,000 clients"
GATEWAYS = "two gateway processes: "
TARGETS = (
    Target("versus-sglang", *_price("", WS, 64), 0.2, SGLANG),
    Target("versus-sglang", *_price("", CHAT, 64), 0.22, SGLANG),
    *(Target("versus-sglang", *_speed(api), 1.15, SGLANG, at_least=True) for api in (WS, CHAT)),
    Target("versus-dynamo", *_price("", WS, 64), 0.15, DYNAMO),
    *(Target("versus-dynamo", *_speed(api), 1.25, DYNAMO, at_least=True) for api in (WS, CHAT)),
    *(Target("versus-sglang-16", *_price("", api, 16), 0.35, SGLANG) for api in (WS, CHAT)),
    *(Target("versus-sglang-nodes", *_price(", two nodes", api, 64), 0.3, SGLANG) for api in (WS, CHAT)),
    *(Target("versus-dynamo-mocker", *_mocked(TOKEN, clients, 128), 0.8, MOCKER) for clients in (32, 256)),
    *(Target("versus-dynamo-mocker", *_mocked(REQUEST, clients, 16), 0.7, MOCKER) for clients in (32, 256)),
    *(Target("versus-dynamo-mocker-burst", *_burst(f"first token {p} ms"), 1.0, MOCKER) for p in ("p50", "p99")),
    Target("added-latency", FIRST_TOKEN, of_table(ADDED, "first token p50 ms, 1 client"), 2.0, " ms"),
    Target(
        "added-latency",
        "gap p99, 64 clients, over the bare engine's",
        of_table(ADDED, "gap p99 ms, 64 clients"),
        1.2,
        " x",
    ),
    Target("streams", LONGEST_GAP, longest_gap, 250.0, " ms", worst=True),
    *(Target("streams", *_memory(clients), 60.0, " kB") for clients in (1000, 4096)),
    Target("clients", STEEPEST, steepest, SLACK, " x", worst=True),
    Target("gateways", f"{GATEWAYS}CPU of the busier over an equal share", busiest_share, 1.1, " x"),
    *(_turn(tokens) for tokens in (45_000, 128_000)),
    Target(
        "gateways",
        f"{GATEWAYS}CPU us a request, of the gateway's nodes",
        ratio(gateway_us, CHAT, 256, 16),
        1.05,
        " x one process",
    ),
)
